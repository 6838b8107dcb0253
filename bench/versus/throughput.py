"""Throughput and latency by the number of concurrent requests.

Prompts of 126 tokens without a common prefix, the same on every side and new in every round; for a vision
model, a question each about an image that no earlier request had.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.client import Answer, burst
from bench.models import image_url, question, random_text
from bench.processes import tree_cpu_s
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import OURS, Entry
from bench.versus.turns import Figure, Taken, Task, Values, entries, within
from deploy.load.samples import percentile

LINE = "throughput"
CONCURRENCIES = (1, 4, 16, 64)
REQUESTS = {1: 16, 4: 32, 16: 64, 64: 128}
MAX_TOKENS = 48
TEXT_TOKENS = 116
"""126 together with the tokens of the template."""
IMAGE_SIDE = 96
ALIKE = 0.02
"""Prompts may differ in length by this share between sides, since templates are rendered with different
dates."""

Prompts = Sequence[str | list[dict[str, Any]]]


def figures(at: int) -> list[Figure]:
    return [
        Figure("rate", "tokens/s", "", "more", at),
        Figure("first", "first text, median", "ms", "less", at),
        Figure("token", "time per token after the first, median of answers", "ms", "less", at),
        Figure("gap99", "gap between pieces, p99", "ms", "less", at),
        Figure("cpu", "CPU seconds per 1,000 tokens", "s", "less", at),
    ]


def prompts(folder: Path, count: int, first: int, *, sees: bool) -> Prompts:
    """Return `count` prompts; `first`: the seed of the first."""
    seeds = range(first, first + count)
    if not sees:
        return [random_text(folder, TEXT_TOKENS, seed) for seed in seeds]
    return [question(random_text(folder, 16, seed), [image_url(IMAGE_SIDE, seed)]) for seed in seeds]


def values(answers: Sequence[Answer], rate: float, cpu_s: float) -> dict[str, float]:
    """Return the figures of a round. Raises `RuntimeError` for an answer without text."""
    if not all(answer.pieces for answer in answers):
        raise RuntimeError("an answer without text")
    gaps = [after - before for answer in answers for before, after in itertools.pairwise(answer.pieces)]
    tokens = sum(answer.tokens for answer in answers)
    return {
        "rate": rate,
        "first": 1000 * statistics.median(answer.first_s for answer in answers),
        # Over a whole answer: the median of gaps is close to zero when pieces arrive in clumps.
        "token": 1000 * statistics.median(map(_token_s, answers)),
        "gap99": 1000 * percentile(gaps, 99),
        "longest": 1000 * max(gaps, default=0.0),
        "cpu": 1000 * cpu_s / tokens,
    }


def _token_s(answer: Answer) -> float:
    return (answer.pieces[-1] - answer.pieces[0]) / max(1, answer.tokens - 1)


def unlike(ours: Sequence[Answer], theirs: Sequence[Answer]) -> str | None:
    """Return why the two cannot be compared: their prompts were not the same."""
    mine, other = (statistics.median(answer.prompt_tokens for answer in side) for side in (ours, theirs))
    if abs(mine - other) <= ALIKE * mine:
        return None
    return f"its prompts have {other:.0f} tokens, ours {mine:.0f}"


def remark(theirs: Sequence[Answer]) -> str | None:
    """Return a note on the answers: an unexpected length, or reset connections."""
    lengths = sorted({answer.tokens for answer in theirs})
    if lengths != [MAX_TOKENS]:
        return f"its answers have {lengths[0]} to {lengths[-1]} tokens, not {MAX_TOKENS}"
    resets = sum(answer.resets for answer in theirs)
    return f"{resets} connections reset, then reopened by the client" if resets else None


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model, one concurrency after another."""
    with fleet(task.folder, task.names, max(CONCURRENCIES)) as up:
        for at in task.concurrencies or CONCURRENCIES:
            answered: dict[str, list[Answer]] = {}

            def turn(server: Server, round: int, at: int = at) -> Values:
                count = REQUESTS[at] if round else at
                texts = prompts(
                    task.folder, count, 100_000 * CONCURRENCIES.index(at) + 1000 * round, sees=task.sees
                )
                return within(_turn(server, texts, at, answered))  # noqa: B023 - called before the next case

            taken = up.take_turns(turn, task.rounds)
            _note(taken, answered)
            yield entries(task.model, LINE, figures(at), taken, task.run)


async def _turn(
    server: Server, texts: Prompts, at: int, answered: dict[str, list[Answer]]
) -> dict[str, float]:
    before = tree_cpu_s(server.process)
    # Set for all, since one server's default closes the reasoning.
    work, answers = await burst(server, texts, at, MAX_TOKENS, enable_thinking=True)
    answered.setdefault(server.name, []).extend(answers)
    return values(answers, work.rate, tree_cpu_s(server.process) - before)


def _note(taken: dict[str, Taken], answered: dict[str, list[Answer]]) -> None:
    """Add notes to the sides; discard the figures of those whose work cannot be compared."""
    for name, each in taken.items():
        if each.note is None and name != OURS and OURS in answered:
            each.note = unlike(answered[OURS], answered[name])
            if each.note is not None:
                each.rounds = []
            else:
                each.note = remark(answered[name])
