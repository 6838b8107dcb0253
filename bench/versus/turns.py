"""Sides in turns, each of which may fail: a failure affects only its own figures."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from bench.rivals import NotServing
from bench.versus.results import Better, Entry, Side
from tests.conformance.environments import NotMade

log = logging.getLogger(__name__)

TURN_S_MAX = 300.0
NOTE_MAX = 160
TROUBLES = (
    ExceptionGroup,
    LookupError,
    NotMade,
    NotServing,
    OSError,
    RuntimeError,
    httpx.HTTPError,
    msgspec.MsgspecError,
    psutil.Error,
    statistics.StatisticsError,
)
"""Errors that a server causes when it dies, refuses, hangs, or sends an unexpected answer."""


@dataclass(frozen=True)
class Figure:
    """A figure that a line measures. `key`: its key in the turns' values; `at`: concurrency."""

    key: str
    name: str
    unit: str
    better: Better
    at: int | None = None


@dataclass(frozen=True)
class Task:
    """What a line measures: one model, by the named servers. `run`: key of the run. `sees`: whether requests
    have images. `concurrencies`: empty for all of the line, if it has several."""

    model: str
    folder: Path
    names: Sequence[str]
    rounds: int
    run: str
    sees: bool = False
    concurrencies: Sequence[int] = ()


Values = Mapping[str, float]
Turn = Callable[[int], Values]
"""Called with the number of the round, of which round 0 warms up; returns figures by their keys."""


@dataclass
class Taken:
    """Results of one side's turns."""

    rounds: list[Values] = field(default_factory=list)
    note: str | None = None

    def side(self, key: str) -> Side:
        return Side([values[key] for values in self.rounds if key in values], self.note)


def take_turns(turns: Mapping[str, Turn], rounds: int, *, warm: bool = True) -> dict[str, Taken]:
    """Run all sides in each round, the first rotating. A side that fails gets no more turns."""
    names = list(turns)
    taken = {name: Taken() for name in names}
    for number in range(0 if warm else 1, rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if taken[name].note is None:
                began = time.monotonic()
                _take(turns[name], number, taken[name])
                log.info("%s, round %d: %.0f s", name, number, time.monotonic() - began)
    return taken


def _take(turn: Turn, number: int, taken: Taken) -> None:
    try:
        values = turn(number)
    except TROUBLES as error:
        taken.note = f"round {number}: {describe(error)}"
        return
    if number > 0:
        taken.rounds.append(values)


def describe(error: BaseException) -> str:
    """Describe an error in one line; of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP status {error.response.status_code}"
    said = " ".join(str(error).split())
    kind = type(error).__name__
    if not isinstance(error, NotServing | NotMade):
        said = f"{kind}: {said}" if said else kind
    return said[:NOTE_MAX]


def within(talk: Coroutine[Any, Any, Values], seconds: float = TURN_S_MAX) -> Values:
    """Run a turn to its end. Raises `TimeoutError` after `seconds`."""
    return asyncio.run(asyncio.wait_for(talk, seconds))


def entries(
    model: str, line: str, figures: Sequence[Figure], taken: Mapping[str, Taken], run: str
) -> list[Entry]:
    """Return an entry for each figure."""
    return [
        Entry(
            model=model,
            line=line,
            figure=figure.key,
            name=figure.name,
            unit=figure.unit,
            better=figure.better,
            run=run,
            sides={name: each.side(figure.key) for name, each in taken.items()},
            at=figure.at,
        )
        for figure in figures
    ]
