"""Measure the cost of verify steps, which feed a row several tokens, on a warm engine; takes a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from worker.interfaces import Engine
from worker.values import PRICED_COLUMNS, SamplingParams

_ROW = "priced"
_PROMPT = (1, 2, 3, 4, 5)
_DRAFTS = tuple(range(6, 5 + PRICED_COLUMNS))
_LAPS = 2
"""Repetitions of each kind of step; the fastest counts, because the machine may be busy."""


def position_cost(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return `Model`'s column price, at least 0. Resets the engine. The sequence of calls does not
    depend on results, because all ranks of a sharded model make it."""
    lap = partial(_lap, engine, clock)
    engine.prefill({_ROW: _PROMPT[:-1]})
    engine.start(_ROW, _PROMPT, len(_PROMPT), SamplingParams())
    wide = min(lap(_DRAFTS) for _ in range(_LAPS))
    engine.step()  # may feed accepted tokens again
    engine.step()  # starts the pipeline
    plain = min(lap(()) for _ in range(_LAPS))
    engine.reset()
    return max(0.0, wide / plain - 1) / (PRICED_COLUMNS - 1)


def _lap(engine: Engine, clock: Callable[[], float], drafts: Sequence[int]) -> float:
    began = clock()
    engine.step({_ROW: drafts} if drafts else {})
    return clock() - began
