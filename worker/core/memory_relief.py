"""Memory relief: what a worker gives back while the operating system reports memory pressure. Pure.

The reported level decides, with two times. A stage rises at once with the level, and by one more if critical
pressure lasts; it falls by one after each `CALM_S` in which nothing called for it. So between a rise and the
next fall pass at least `CALM_S`, however the level jumps. Running requests keep their memory at every stage:
outputs do not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from protocol.errors import Code, RequestError
from protocol.types import MemoryPressure
from worker.process.memory_pressure import PressureLevel

STEP_S = 10.0
"""Seconds until critical pressure that lasts leads to refusals, and until relief is asked for again. PSI is a
mean of ten seconds, so what a stage has freed does not show sooner."""
CALM_S = 30.0
"""Seconds without pressure until a stage is over: programs that allocate in bursts would otherwise have the
caches filled and emptied in turn. It is also the Retry-After."""
SHRUNK_SHARE = 0.25
"""Share of its memory that the prefix cache has under pressure: enough for the next turns of few sessions."""
LONG_TOKENS = 2048
"""Tokens to be computed beyond which a prompt is long: a pass of the default size. For shorter ones the model
reads much more memory than they take."""


class Relief(IntEnum):
    """Stages. Each includes those before it."""

    NONE = 0
    SHRINK = 1
    """Buffers and images that are not in use are freed, and the prefix cache has `SHRUNK_SHARE`."""
    DROP_IDLE = 2
    """All prefixes in memory are dropped; those with a file remain on disk."""
    REFUSE_LONG = 3
    """New long prompts are refused."""

    @property
    def cache_share(self) -> float:
        """Share of its memory that the prefix cache may take."""
        return SHRUNK_SHARE if self else 1.0

    def check_prompt(self, tokens: int) -> None:
        """Raise `RequestError` if a new prompt, of which `tokens` must be computed, has to wait."""
        if self is Relief.REFUSE_LONG and tokens > LONG_TOKENS:
            message = (
                f"The machine is short of memory, so new prompts with more than {LONG_TOKENS} tokens to "
                f"compute are refused for now; this one has {tokens}. Retry later."
            )
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=CALM_S)


@dataclass(slots=True)
class ReliefPolicy:
    """The policy of one worker."""

    stage: Relief = Relief.NONE
    _level: PressureLevel = PressureLevel.NONE
    _rose_at: float = -math.inf
    _upheld_at: float = -math.inf
    """When the level last called for the stage, or the stage fell."""
    _asked_at: float = -math.inf

    @property
    def status(self) -> MemoryPressure:
        return MemoryPressure(level=self._level.name.lower(), relief=self.stage.name.lower())

    def observe(self, level: PressureLevel, now: float) -> Relief | None:
        """Return the stage to be put into effect `now`: it has changed, or pressure lasts and what is idle
        again must go. None: nothing is new."""
        self._level, before = level, self.stage
        is_critical = level is PressureLevel.CRITICAL
        if level > self.stage:
            self.stage, self._rose_at = Relief(level), now
        elif is_critical and self.stage is Relief.DROP_IDLE and now - self._rose_at >= STEP_S:
            self.stage, self._rose_at = Relief.REFUSE_LONG, now
        if is_critical or level >= self.stage:
            self._upheld_at = now
        elif now - self._upheld_at >= CALM_S:
            self.stage, self._upheld_at = Relief(self.stage - 1), now
        if self.stage == before and not (level and now - self._asked_at >= STEP_S):
            return None
        self._asked_at = now
        return self.stage
