"""What it costs to feed a row several tokens at once, tried on an engine that is warm: a few steps' time."""

from __future__ import annotations

import time

from worker.contract import Draw, Engine
from worker.drafts import PRICED_COLUMNS

_ROW = "priced"
_PROMPT = (1, 2, 3, 4, 5)
_DRAFTS = tuple(range(6, 5 + PRICED_COLUMNS))
_LAPS = 2
"""Of either kind of step; the quicker one counts: the machine may be busy with others."""


def column_price(engine: Engine) -> float:
    """What each token that a row is fed behind the first adds to a step, in terms of a plain one, at least 0.
    The engine's rows are forgotten. So many calls, whatever comes of them: all ranks of a set make the same."""
    engine.prefill({_ROW: _PROMPT[:-1]})
    engine.start(_ROW, _PROMPT, len(_PROMPT), Draw())
    engine.step()  # only sets out
    plain = min(_lap(engine, ()) for _ in range(_LAPS))
    engine.step({_ROW: _DRAFTS})  # what was under way is read, and drafts behind it are tried if it was the first
    wide = min(_lap(engine, _DRAFTS) for _ in range(_LAPS))
    engine.reset()
    return max(0.0, wide / plain - 1) / (PRICED_COLUMNS - 1)


def _lap(engine: Engine, drafts: tuple[int, ...]) -> float:
    began = time.perf_counter()
    engine.step({_ROW: drafts} if drafts else {})
    return time.perf_counter() - began
