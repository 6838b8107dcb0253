"""Prefix reuse in an agent's loop over HTTP, next to `mlx_lm.server` and `mlx_vlm.server`.

    python -m bench.agent [--models dense,hybrid] [--rounds 3] [--system-tokens 5000] [--servers ...]

A conversation of ten turns, each extending the one before by a tool call and its result. Afterwards some of
its prompts are sent again behind different first words, for the time to first text without reuse. The same
for our server alone, with its worker killed before the sixth turn. Then sixteen first requests at once that
share 1,500 tokens and differ after them. Every round has texts of its own; servers take turns, prefix caches
are on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import Answer, ask, client
from bench.conversation import TOOLS, Message, estranged, grown, opening
from bench.models import bench_folder, random_text
from bench.processes import kill_worker
from bench.reuse import Crowd, Trace, Turn, prefilled, print_crowds, print_traces, print_turns
from bench.rivals import NAMES, Server, servers

OURS = NAMES[0]
KILLED = f"{OURS}, killed"
QUESTION_TOKENS, CALL_TOKENS, ANSWER_TOKENS = 50, 10, 8
RESULT_TOKENS, RESULT_GROWTH = 100, 10
"""Tokens of the first tool result, and the growth of each later one. Behind 6,000 tokens of system prompt and
tools the new tokens stay below 4% of every prompt, so that 96% of it can be reused."""
OTHER_WORDS = 4
KILL_TURN = 6
TOOL_RUNS_S = 1.0
"""Seconds from an answer to the worker's death, while the agent's tool is running."""
CROWD, CROWD_TOKENS, CROWD_OWN_TOKENS = 16, 1500, 16
"""Requests at once, their shared tokens and their own. With these and the template's, 1.2 prompts of prefill
are the minimum."""
SEEDS_OF_ROUND = 10_000


@dataclass(frozen=True)
class Plan:
    """A conversation. `cold`: the turns that are repeated without a prefix to reuse. `counts_from`: the first
    turn that counts. `kill_turn`: the turn before which the worker is killed."""

    system_tokens: int
    turns: int
    cold: range
    counts_from: int = 2
    kill_turn: int | None = None


class Texts:
    """The random texts of one round, no two with a common prefix."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder = folder
        self._seeds = itertools.count(first)

    def __call__(self, tokens: int) -> str:
        return random_text(self._folder, tokens, next(self._seeds))


async def _say(http: httpx.AsyncClient, server: Server, messages: Sequence[Message]) -> Answer:
    # Set for all, since one server's default closes the reasoning in a way that no later prompt repeats.
    return await ask(http, server, messages, ANSWER_TOKENS, tools=TOOLS, enable_thinking=True)


async def converse(server: Server, texts: Texts, plan: Plan) -> Trace:
    """Run one conversation and return its counted turns."""
    messages = opening(texts(plan.system_tokens), texts(QUESTION_TOKENS))
    prompts: dict[int, list[Message]] = {}
    answers: dict[int, Answer] = {}
    async with client(server) as http:
        for number in range(1, plan.turns + 1):
            if number > 1:
                result = texts(RESULT_TOKENS + RESULT_GROWTH * (number - 2))
                messages = grown(messages, answers[number - 1].text, texts(CALL_TOKENS), result)
            if number == plan.kill_turn:
                await asyncio.to_thread(kill_worker, server.url, TOOL_RUNS_S)
            prompts[number] = messages
            answers[number] = await _say(http, server, messages)
        # At the end: between the turns these would evict the conversation from the cache.
        cold_s = {}
        for number in plan.cold:
            cold = await _say(http, server, estranged(prompts[number], texts(OTHER_WORDS)))
            cold_s[number] = cold.first_s
    counted = range(plan.counts_from, plan.turns + 1)
    return Trace({number: _turn(answers[number - 1], answers[number]) for number in counted}, cold_s)


def _turn(before: Answer, answer: Answer) -> Turn:
    return Turn(answer.prompt_tokens, before.prompt_tokens, answer.cached_tokens, answer.first_s)


async def draft_batch(server: Server, texts: Texts) -> Crowd:
    """Send a first request alone, then a crowd of requests at once."""
    alone = opening(texts(CROWD_TOKENS), texts(CROWD_OWN_TOKENS))
    shared = texts(CROWD_TOKENS)
    crowd = [opening(shared, texts(CROWD_OWN_TOKENS)) for _ in range(CROWD)]
    async with client(server) as http:
        one = await ask(http, server, alone, 1)
        answers = await asyncio.gather(*(ask(http, server, messages, 1) for messages in crowd))
    began = min(answer.sent_at for answer in answers)
    all_s = max(answer.pieces[0] for answer in answers) - began
    return Crowd(one.first_s, all_s, prefilled(answers, one.prompt_tokens))


@dataclass
class Results:
    """Results of each server, round by round. `killed`: of ours alone."""

    traces: dict[str, list[Trace]]
    crowds: dict[str, list[Crowd]]
    killed: list[Trace] = field(default_factory=list)


def measure(folder: Path, up: Sequence[Server], plan: Plan, rounds: int) -> Results:
    """Measure all servers in turns, the first rotating. A short warm-up round before the first is left
    out."""
    results = Results({server.name: [] for server in up}, {server.name: [] for server in up})
    warm_up = Plan(CROWD_TOKENS, turns=2, cold=range(2, 3))
    killed = Plan(plan.system_tokens, KILL_TURN, range(KILL_TURN, KILL_TURN + 1), KILL_TURN, KILL_TURN)
    for number in range(rounds + 1):
        first = number % len(up)
        for server in [*up[first:], *up[:first]]:
            texts = Texts(folder, SEEDS_OF_ROUND * number)
            trace = asyncio.run(converse(server, texts, plan if number else warm_up))
            crowd = asyncio.run(draft_batch(server, texts))
            if number == 0:
                continue
            results.traces[server.name].append(trace)
            results.crowds[server.name].append(crowd)
            if server.name == OURS:
                results.killed.append(asyncio.run(converse(server, texts, killed)))
    return results


def report(model: str, results: Results, plan: Plan, rounds: int, *, each_turn: bool) -> None:
    """Print all tables of one model."""
    turns = f"Turns 2 to {plan.turns} of an agent, {model}, {rounds} rounds"
    if each_turn:
        print_turns(turns, model, results.traces)
    killed = {KILLED: results.killed} if results.killed else {}
    title = f"{turns}; killed: turn {KILL_TURN}, after a SIGKILL" if killed else turns
    print_traces(title, model, results.traces | killed)
    print_crowds(
        f"{CROWD} at once share {CROWD_TOKENS} tokens, {model}, {rounds} rounds", model, results.crowds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system-tokens", type=int, default=5000, help="without the 1,000 of the tools")
    parser.add_argument(
        "--cold-every", type=int, default=4, help="turns per turn that is also timed without reuse"
    )
    parser.add_argument("--each-turn", action="store_true", help="print a table of turns too")
    parser.add_argument("--servers", default=",".join(NAMES))
    options = parser.parse_args()
    plan = Plan(options.system_tokens, options.turns, range(2, options.turns + 1, options.cold_every))
    for model in options.models.split(","):
        folder = bench_folder(model)
        with servers(folder, CROWD, options.servers.split(","), reuse=True) as up:
            results = measure(folder, up, plan, options.rounds)
        report(model, results, plan, options.rounds, each_turn=options.each_turn)


if __name__ == "__main__":
    main()
