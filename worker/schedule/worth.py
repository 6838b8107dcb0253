"""Whether drafts have been worth what they cost, all of it: the steps that try them and those between, which
are no plain ones either, for nothing is computed while their tokens are read. Pure.

What is chosen step by step is chosen by what it should bring. Here is counted what it has brought, whatever
the reason: where steps lose time against plain ones, there are none for a while, and each time for longer.
"""

from __future__ import annotations

LOST_STEPS_MAX = 4.0
"""So many plain steps' time may be lost before drafts rest."""
STEP_COST_MAX = 4.0
"""One step counts for no more than so many plain ones: it may be the machine that was busy."""
REST_STEPS = 128
REST_STEPS_MAX = 8192
_FADING = 0.99
"""Of what was gained or lost so much is left after the next step."""


class Worth:
    """Of all rows of a worker."""

    def __init__(self) -> None:
        self._gained = 0.0
        """Plain steps' time since drafts last rested; below 0: lost."""
        self._rest = 0
        self._next_rest = REST_STEPS

    @property
    def is_resting(self) -> bool:
        """There are to be no drafts now."""
        return self._rest > 0

    def learn(self, tokens: float, cost: float) -> None:
        """A step brought each row so many tokens, in the time of `cost` plain ones."""
        self._gained = self._gained * _FADING + tokens - min(cost, STEP_COST_MAX)
        if self._gained < -LOST_STEPS_MAX:
            self._rest, self._gained = self._next_rest, 0.0
            self._next_rest = min(2 * self._next_rest, REST_STEPS_MAX)
        elif self._gained > LOST_STEPS_MAX:
            self._next_rest = REST_STEPS

    def pass_(self) -> None:
        """A plain step has passed."""
        self._rest = max(0, self._rest - 1)
