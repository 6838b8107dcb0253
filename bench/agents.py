"""Agents at once over HTTP: how soon their sessions end, and what they reuse, on memory for fewer of them.

    python -m bench.agents [--agents 2,8] [--memory 0,140MB] [--servers roundhouse,../before] [--rounds 2]

Each agent makes a few turns, whose prompts repeat the one before and add a tool's result; every second agent
has the same system prompt. Most tools return within a second. `--memory`: bytes for KV caches, 0 for what is
free. Servers take turns, each starts anew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.client import ask, client
from bench.conversation import Texts, grown, opening
from bench.rivals import Server, server
from bench.timing import number, print_table, spread
from protocol.settings.reader import parse_size

MODEL = Path(".venv") / "models" / "smollm2"
TURNS, SYSTEM_TOKENS, QUESTION_TOKENS, CALL_TOKENS, ANSWER_TOKENS = 6, 400, 100, 10, 12
RESULT_TOKENS = (40, 120)
SOON, SOON_S, LATE_S, BEGIN_S = 0.86, (0.05, 1.0), (2.0, 6.0), (0.0, 4.0)
"""Share of tools that return soon, bounds of both kinds in seconds, and of the time at which agents begin."""


@dataclass(frozen=True)
class Session:
    """Seconds of a session and to the first text of each turn; of later turns the cached share."""

    seconds: float
    first_s: Sequence[float]
    cached: Sequence[float]


async def converse(http: httpx.AsyncClient, served: Server, folder: Path, agent: int, round: int) -> Session:
    """Run one agent to its end."""
    dice, texts = random.Random(f"{round} {agent}"), Texts(folder, 1000 * (100 * round + agent))
    messages = opening(Texts(folder, 10**6 + 2 * round + agent % 2)(SYSTEM_TOKENS), texts(QUESTION_TOKENS))
    await asyncio.sleep(dice.uniform(*BEGIN_S))
    loop = asyncio.get_running_loop()
    began, first_s, cached, seen = loop.time(), [], [], 0
    for turn in range(TURNS):
        answer = await ask(http, served, messages, ANSWER_TOKENS, prompt_cache_key=f"{round}-{agent}")
        first_s.append(answer.first_s)
        if turn:
            cached.append((answer.cached_tokens or 0) / seen)
        seen = answer.prompt_tokens
        messages = grown(messages, answer.text, texts(CALL_TOKENS), texts(dice.randint(*RESULT_TOKENS)))
        if turn < TURNS - 1:
            await asyncio.sleep(dice.uniform(*(SOON_S if dice.random() < SOON else LATE_S)))
    return Session(loop.time() - began, first_s, cached)


async def run(served: Server, folder: Path, agents: int, round: int) -> list[Session]:
    """Run all agents at once."""
    async with client(served) as http, asyncio.timeout(1800):
        return await asyncio.gather(*(converse(http, served, folder, each, round) for each in range(agents)))


def _line(name: str, memory: str, rounds: Sequence[Sequence[Session]]) -> list[str]:
    sessions = list(itertools.chain.from_iterable(rounds))
    first_s = [each for session in sessions for each in session.first_s[1:]]
    cached = [each for session in sessions for each in session.cached]
    return [
        name,
        str(len(rounds[0])),
        memory,
        str(spread([statistics.mean(each.seconds for each in round) for round in rounds])),
        number(max(each.seconds for each in sessions)),
        number(statistics.median(first_s)),
        number(max(first_s)),
        f"{100 * statistics.mean(cached):.0f}%",
        f"{100 * min(cached):.0f}%",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", default="2,8")
    parser.add_argument("--memory", default="0,140MB")
    parser.add_argument("--servers", default="roundhouse")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    folder = MODEL.resolve()
    # Who waits for memory would be refused otherwise, and come again.
    os.environ["ROUNDHOUSE_MAX_WAITING_TOKENS"] = str(10**9)
    lines = []
    for agents, memory in itertools.product(map(int, asked.agents.split(",")), asked.memory.split(",")):
        os.environ.pop("ROUNDHOUSE_CACHE_LIMIT_BYTES", None)
        if limit := parse_size(memory):
            os.environ["ROUNDHOUSE_CACHE_LIMIT_BYTES"] = str(limit)
        done: dict[str, list[list[Session]]] = {name: [] for name in asked.servers.split(",")}
        for round, name in itertools.product(range(asked.rounds), done):
            with server(name, folder, agents, reuse=True) as served:
                done[name].append(asyncio.run(run(served, folder, agents, round)))
        lines += [_line(name, memory, rounds) for name, rounds in done.items()]
    print_table(
        f"Agents at once, {folder.name}, {TURNS} turns, {asked.rounds} rounds",
        ["", "agents", "memory", "session, s", "longest", "first, s", "longest", "cached", "least"],
        lines,
        "Columns: mean duration of a session (median, smallest-largest round), longest; time to first text "
        "of turns but the first, median, longest; cached share of the prompt before, mean, least.",
    )


if __name__ == "__main__":
    main()
