"""What it costs to feed a row several tokens at once, tried on an engine that is warm: a few steps' time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from worker.contract import Draw, Engine
from worker.drafts import PRICED_COLUMNS

_ROW = "priced"
_PROMPT = (1, 2, 3, 4, 5)
_DRAFTS = tuple(range(6, 5 + PRICED_COLUMNS))
_LAPS = 2
"""Of either kind of step; the quicker one counts: the machine may be busy with others."""


def column_price(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """See `contract.Model`; at least 0. The engine's rows are forgotten. The calls are the same, whatever
    comes of them: all ranks of a set make them."""
    lap = partial(_lap, engine, clock)
    engine.prefill({_ROW: _PROMPT[:-1]})
    engine.start(_ROW, _PROMPT, len(_PROMPT), Draw())
    engine.step()  # only sets out
    plain = min(lap(()) for _ in range(_LAPS))
    engine.step({_ROW: _DRAFTS})  # a plain pass is still under way
    wide = min(lap(_DRAFTS) for _ in range(_LAPS))
    engine.reset()
    return max(0.0, wide / plain - 1) / (PRICED_COLUMNS - 1)


def _lap(engine: Engine, clock: Callable[[], float], drafts: Sequence[int]) -> float:
    began = clock()
    engine.step({_ROW: drafts} if drafts else {})
    return clock() - began
