"""The gateway alone: events per second, next to the same bytes from a bare ASGI app. Only our server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.gateway import Round, compare
from bench.versus.results import OURS, Entry
from bench.versus.turns import Figure, Taken, Task, entries

LINE = "gateway"
CEILING = "bare ASGI app"
STREAMS, EVENTS = 32, 4000
FIGURES = [
    Figure("events", f"{STREAMS} streams, events/s", "", "more"),
    Figure("cpu", f"{STREAMS} streams, events per CPU second", "", "more"),
]


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line, which needs no model."""
    ours, ceiling = compare(STREAMS, EVENTS, task.rounds)
    taken = {OURS: _taken(ours), CEILING: _taken(ceiling)}
    yield entries(task.model, LINE, FIGURES, taken, task.run)


def _taken(rounds: Sequence[Round]) -> Taken:
    return Taken([{"events": each.per_second, "cpu": each.per_cpu_second} for each in rounds])
