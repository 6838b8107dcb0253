"""The first requests after a start: bursts of short chats in a row. Each round starts each server anew."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.rivals import server
from bench.versus.chats import measure_burst, prompts
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, take_turns, within

LINE = "starts"
CONCURRENCIES = (1, 4, 16, 64)
BURSTS = {1: 5, 4: 5, 16: 5, 64: 3}
ROWS_MIN = 16
MAX_TOKENS = 40
WORDS = 12, 24
"""Words of the quoted text: 40 to 60 tokens with the template and the question."""
_PHASES = {"1": "first burst", "": "later bursts"}


def figures_at(at: int) -> list[Figure]:
    """Return the figures at a concurrency."""
    return [
        figure
        for suffix, phase in _PHASES.items()
        for figure in (
            Figure(f"rate{suffix}", f"{phase}: tokens/s", "", "more", at),
            Figure(f"last{suffix}", f"{phase}: first text, last of all", "ms", "less", at),
            Figure(f"gap99{suffix}", f"{phase}: gap between pieces, p99", "ms", "less", at),
        )
    ]


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line, one concurrency after another. One server runs at a time."""
    for at in task.concurrencies or CONCURRENCIES:
        turns = {name: partial(_turn, name, task.folder, at) for name in task.names}
        yield entries(task.model, LINE, figures_at(at), take_turns(turns, task.rounds, warm=False), task.run)


def _turn(name: str, folder: Path, at: int, round: int) -> Values:
    with server(name, folder, max(ROWS_MIN, at)) as started:
        bursts = [
            within(measure_burst(started, prompts(at, 1000 * round + 100 * number, *WORDS), at, MAX_TOKENS))
            for number in range(BURSTS[at])
        ]
    first, later = bursts[0], bursts[1:]
    settled = {key: statistics.median(each[key] for each in later) for key in first}
    return {**settled, **{f"{key}1": value for key, value in first.items()}}
