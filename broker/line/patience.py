"""How much of no use a peer may send, and what becomes of one that sends more. Pure, the clock handed in.

What a worker says of its requests is bounded by what those may bring, and by clients who read it: a fast one
is no nuisance. Nothing bounds the rest: heartbeats, deltas that nobody waits for, garbage. It costs patience,
which grows back. A peer for whom there is none left is turned away for good: it is told so on each connection
that it makes, what it says there is dropped unread, and one that goes on and on is cut off.

The unit is a small message. The busiest workers send a few of no use in a second, or some ten thousand at
once, when all their clients go while much is queued between the two.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

USELESS_MESSAGES_MAX = 50_000
USELESS_MESSAGES_PER_S = 5_000
FULL_AFTER_S = USELESS_MESSAGES_MAX / USELESS_MESSAGES_PER_S
"""After so long without a useless message patience is what it was at first."""
DELTA_COST = 0.05
DELTAS_MAX = 4096
"""As many rows as a worker can have: in one message, deltas beyond it cost as much as messages."""
BYTES_PER_MESSAGE = 4096
"""So many a message may have, and each delta that is of use; as many more cost as much as another message."""
DROPPED_MAX = 1000
"""So many messages a peer that was turned away may send on a connection before that is cut."""
TURNED_AWAY_MAX = 1024
"""Peers that are remembered as turned away."""


def cost(size_bytes: int, deltas: int, useful: int) -> float:
    """Of a message with so many deltas, so many of them of use; 0 for what is worth its bytes."""
    useless = deltas - useful
    beyond = max(0, useless - DELTAS_MAX)
    bulk = max(0, size_bytes - BYTES_PER_MESSAGE * (1 + useful)) / BYTES_PER_MESSAGE
    return (not useful) + DELTA_COST * (useless - beyond) + beyond + bulk


class Drop(Enum):
    """What else is done when a message of one that was turned away is dropped."""

    TELL = auto()
    """It is the first one on this connection: it should hear why."""
    NOTHING = auto()
    CUT = auto()
    """Enough of this connection."""


class Patience:
    """With all the peers of a line."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Patience with those who have cost some, and when they did last, who did so longest ago in front."""
        self._turned_away: OrderedDict[str, int] = OrderedDict()
        """And how many messages were dropped on the connection they have now."""

    def spend(self, peer: str, amount: float, now: float) -> bool:
        """What a message of this peer costs. False: that was too much, and it is turned away."""
        left, at = self._left.pop(peer, (float(USELESS_MESSAGES_MAX), now))
        left = min(USELESS_MESSAGES_MAX, left + USELESS_MESSAGES_PER_S * (now - at)) - amount
        self._forget(now)
        if left >= 0:
            self._left[peer] = left, now
            return True
        self._turned_away[peer] = 0
        if len(self._turned_away) > TURNED_AWAY_MAX:
            self._turned_away.popitem(last=False)
        return False

    def _forget(self, now: float) -> None:
        while self._left and next(iter(self._left.values()))[1] + FULL_AFTER_S <= now:
            self._left.popitem(last=False)

    def is_over(self, peer: str) -> bool:
        """Whether it was turned away."""
        return peer in self._turned_away

    def drop(self, peer: str, *, first: bool) -> Drop:
        """A message of a peer that was turned away. `first`: on this connection, or since it was."""
        dropped = self._turned_away[peer] = 1 if first else 1 + self._turned_away[peer]
        if first:
            return Drop.TELL
        return Drop.CUT if dropped % DROPPED_MAX == 0 else Drop.NOTHING
