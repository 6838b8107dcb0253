"""Progress watchdog: finds starved requests, which make no progress although their process works. Pure.

The worker watches its rows with it, and the gateway, with a separate clock, the requests sent to each worker.
A request may wait for a long time without being starved. Waiting is legitimate while one of these holds:

* the queue moves: a request before it that is not decoding yet has made progress recently;
* the queue is full: no place or memory is free, and no request behind it was admitted since it last waited
  legitimately;
* it waits for the prefix of another request, which has made progress recently.

A request without progress or legitimate waiting for longer than the bound is starved, which is a bug.
"Recently" means within the same bound.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

CHECK_EVERY_S = 0.5
TICK_S_MAX = 1.0
"""Maximum seconds counted between two checks, so that a long step, a stopped process or a sleeping machine
starves no request."""
NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Watched:
    """One request, as input of the watchdog.

    `order`: its position in the queue, smallest first. `state`: changes with any progress of the request.
    `has_place`: it was admitted. `waits_for`: the request whose prefix it waits for.
    """

    id: str
    order: tuple[float, ...]
    state: Hashable
    has_place: bool = False
    is_decoding: bool = False
    waits_for: str | None = None


@dataclass(slots=True)
class _Seen:
    """Times of a request's last events. `changed_at`: its state changed after its arrival; `fine_at`: it
    arrived, changed, or waited legitimately; `placed_at`: it was admitted."""

    state: Hashable
    fine_at: float
    changed_at: float = NEVER
    placed_at: float = NEVER


class ProgressWatch:
    """Watchdog of one queue. It has its own clock, in seconds, which `check` advances."""

    def __init__(self, bound_s: float) -> None:
        """`bound_s`: seconds without progress after which a request is starved."""
        self._bound_s = bound_s
        self._seen: dict[str, _Seen] = {}
        self._now_s = 0.0
        self._checked_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Return whether the next check is due. `now`: the caller's clock."""
        if self._checked_at is None:
            self._checked_at = now
        return now - self._checked_at >= min(CHECK_EVERY_S, self._bound_s / 4)

    def check(self, requests: Iterable[Watched], now: float, *, has_room: bool) -> list[str]:
        """Return the ids of starved requests. Each is reported again after every further bound.

        `requests`: all requests of the queue. `has_room`: one more could be admitted.
        """
        elapsed_s = 0.0 if self._checked_at is None else now - self._checked_at
        self._now_s += min(max(0.0, elapsed_s), TICK_S_MAX)
        self._checked_at = now
        queue = sorted(requests, key=lambda request: request.order)
        self._note(queue)
        self._excuse(queue, has_room)
        starved = [r.id for r in queue if self._now_s - self._seen[r.id].fine_at > self._bound_s]
        for id in starved:
            self._seen[id].fine_at = self._now_s
        return starved

    def _note(self, queue: Sequence[Watched]) -> None:
        before, self._seen = self._seen, {}
        for request in queue:
            seen = before.get(request.id) or _Seen(request.state, self._now_s)
            if seen.state != request.state:
                seen.state, seen.changed_at, seen.fine_at = request.state, self._now_s, self._now_s
            if not request.has_place:
                seen.placed_at = NEVER
            elif seen.placed_at == NEVER:
                seen.placed_at = self._now_s
            self._seen[request.id] = seen

    def _excuse(self, queue: Sequence[Watched], has_room: bool) -> None:
        """Update `fine_at` of the requests that wait legitimately now."""
        placed_behind = self._last_placed_behind(queue)
        moves = False
        for request in queue:
            seen = self._seen[request.id]
            is_queued = not (request.has_place or has_room or placed_behind[request.id] >= seen.fine_at)
            waits_rightly = moves or is_queued or self._got_on_lately(request.waits_for)
            if waits_rightly and not request.is_decoding:
                seen.fine_at = self._now_s
            moves = moves or (not request.is_decoding and self._got_on_lately(request.id))

    def _got_on_lately(self, id: str | None) -> bool:
        seen = None if id is None else self._seen.get(id)
        return seen is not None and self._now_s - seen.changed_at <= self._bound_s

    def _last_placed_behind(self, queue: Sequence[Watched]) -> dict[str, float]:
        """Return, for each request, when a request behind it was last admitted."""
        found: dict[str, float] = {}
        last = NEVER
        for request in reversed(queue):
            found[request.id] = last
            last = max(last, self._seen[request.id].placed_at)
        return found
