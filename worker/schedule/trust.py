"""Whether a network is asked for guesses at all: it is tried, made use of, or let rest. Pure.

While it is tried it guesses beside plain steps. Nobody is fed what it says, so it costs its own passes and
nothing else; and what it says is compared with what was drawn. Where nothing is expected of it, it rests,
each time for longer, and is tried again. Nothing of that is any one request's: what was learned holds for
all.
"""

from __future__ import annotations

TRIED_GUESSES = 8
"""So many are compared before what is expected of it counts."""
TRIED_COST_MAX = 16.0
"""Or fewer, once they have cost as much as so many plain steps."""
GUESS_COST_MAX = 4.0
"""Each counts for no more than that: it may be the machine that was busy."""
VAIN_STEPS = 32
"""Steps on end in which nothing was expected of it, before it rests."""
PROVEN_STEPS = 64
"""Once so many were made with its guesses its next rest is a short one: the machine may have been busy."""
REST_STEPS_PROVEN = 64
REST_STEPS = 512
REST_STEPS_MAX = 8192


class Trust:
    """In one network, of all rows of a worker."""

    def __init__(self) -> None:
        self._left = TRIED_GUESSES
        self._cost = 0.0
        self._rest = 0
        self._next_rest = REST_STEPS
        self._vain = 0
        self._used = 0

    @property
    def is_resting(self) -> bool:
        """It is not to be asked, nor to read anything."""
        return self._rest > 0

    @property
    def is_tried(self) -> bool:
        """It is asked beside plain steps, for a row or a few."""
        return not self._rest and self._left > 0

    def tried(self, guesses: int, cost: float) -> None:
        """So many of its guesses were compared with what was drawn, at a cost of so many plain steps."""
        self._cost += min(max(0.0, cost), GUESS_COST_MAX)
        self._left = 0 if self._cost >= TRIED_COST_MAX else max(0, self._left - guesses)

    def used(self) -> None:
        """Rows are fed its guesses in this step."""
        self._vain = 0
        self._used += 1
        if self._used >= PROVEN_STEPS:
            self._next_rest = REST_STEPS_PROVEN

    def vain(self) -> None:
        """Nothing is expected of it in this step, for any row."""
        self._vain += 1
        if self._vain >= VAIN_STEPS:
            self._rest, self._vain, self._used = self._next_rest, 0, 0
            self._next_rest = min(2 * self._next_rest, REST_STEPS_MAX)

    def pass_(self) -> bool:
        """A step has passed. Whether a rest is over, and it is to be tried again."""
        if not self._rest:
            return False
        self._rest -= 1
        if not self._rest:
            self._left, self._cost = TRIED_GUESSES, 0.0
        return not self._rest
