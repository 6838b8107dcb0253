"""Flood guard: a leaky bucket of useless messages per peer. Pure; the clock is injected.

Useful output is bounded by the requests and by how fast clients read, so a fast worker is no problem.
Nothing bounds the rest: heartbeats, deltas without a flight, invalid data. These use up an allowance that
refills over time. A peer that exceeds it is rejected for good: it is told so on each of its connections, its
messages are dropped unread, and a connection that keeps sending is closed.

The unit is a small message. The busiest workers send a few useless ones a second, or some ten thousand at
once when all their clients leave while many messages are queued.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

USELESS_MESSAGES_MAX = 50_000
USELESS_MESSAGES_PER_S = 5_000
FULL_AFTER_S = USELESS_MESSAGES_MAX / USELESS_MESSAGES_PER_S
"""Time without useless messages after which the allowance is full again."""
DELTA_COST = 0.05
DELTAS_MAX = 4096
"""Maximum number of rows of a worker. Further useless deltas in a message cost as much as messages."""
BYTES_PER_MESSAGE = 4096
"""Free bytes of a message and of each useful delta; each further such number costs another message."""
DROPPED_MAX = 1000
"""Messages that a rejected peer may send on a connection before that is closed."""
TURNED_AWAY_MAX = 1024
"""Maximum number of rejected peers that are stored."""


def cost(size_bytes: int, deltas: int, useful: int) -> float:
    """Return the cost of a message with `deltas`, `useful` of them useful; 0 if it is worth its bytes."""
    useless = deltas - useful
    beyond = max(0, useless - DELTAS_MAX)
    bulk = max(0, size_bytes - BYTES_PER_MESSAGE * (1 + useful)) / BYTES_PER_MESSAGE
    return (not useful) + DELTA_COST * (useless - beyond) + beyond + bulk


class DropAction(Enum):
    """Action besides dropping a message of a rejected peer."""

    TELL = auto()
    """Tell the peer the reason: it is the first message on this connection."""
    NOTHING = auto()
    CUT = auto()
    """Close the connection."""


class FloodGuard:
    """Flood guard for all peers of a socket."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Remaining allowance and time of the last cost of each peer that had one, oldest first."""
        self._turned_away: OrderedDict[str, int] = OrderedDict()
        """Rejected peers: number of messages dropped on the present connection."""

    def charge(self, peer: str, amount: float, now: float) -> bool:
        """Charge a peer for a message. Return False if that exceeds its allowance; it is then rejected."""
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

    def is_turned_away(self, peer: str) -> bool:
        """Return whether the peer was rejected."""
        return peer in self._turned_away

    def drop(self, peer: str, *, first: bool) -> DropAction:
        """Count a message of a rejected peer. `first`: on this connection, or since the rejection."""
        dropped = self._turned_away[peer] = 1 if first else 1 + self._turned_away[peer]
        if first:
            return DropAction.TELL
        return DropAction.CUT if dropped % DROPPED_MAX == 0 else DropAction.NOTHING
