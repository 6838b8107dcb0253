"""Sessions of agents, and which of them go on while memory is short. Pure.

The turns of an agent repeat the prompt before, so a session is soon back for what it has computed. Requests
are begun in the order of their arrival, but one whose session is younger is *held* while older sessions need
the memory: those with a request, and those behind a tool call, for as long as computing their prompt anew
would take, but while nothing runs only for `IDLE_S`: nobody knows which turn of a session was its last. Who
waits for that long in vain loses at most as much again as who does not wait. So as many sessions run as the
memory holds, from cached prefixes, and the others begin when one of these ends, instead of all evicting each
other's prefixes at each turn. Nobody is held for longer than `HELD_S_MAX`.

Sub-agents are as old as the session that started them, which lasts as long as they do.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

HELD_S_MAX = 240.0
"""Longest time for which a request is held. Clients wait for ten minutes. With half of it, whoever has waited
takes all the time of a machine that computes a prompt in 40 s (bench/sessions.py: eight agents on memory for
two)."""
IDLE_S = 20.0
"""Longest time for which an idle worker keeps memory for a session behind a tool call. Most tools return
within a second. Eight agents on memory for two, four on two, eight on four end 1.96, 1.24 and 1.12 times as
soon as without holding; with 10 s 1.92, 1.19, 1.08; without this bound 1.87, 1.16, 1.11."""
SMALL_SHARE = 1 / 32
"""Share of the memory up to which a request is never held: it displaces little."""
SILENCE_S_MAX = 900.0
"""Silence after which a session begins anew."""
SESSIONS_MAX = 1024


@dataclass(eq=False, slots=True)
class Session:
    """A session. `number`: the smallest is the oldest. `requests`, `running`: its requests in the scheduler,
    and how many of them have memory; those of sub-agents count only for `requests`. `nbytes`: memory of a row
    as long as its last turn that ran. It is kept for `kept_s`, the time to compute it, after `active_at`."""

    number: int
    parent: Session | None = None
    requests: int = 0
    running: int = 0
    nbytes: int = 0
    active_at: float = 0.0
    kept_s: float = 0.0

    def is_kept(self, now: float, *, is_idle: bool) -> bool:
        """Return whether memory is kept for it that no row of it has. `is_idle`: no row runs."""
        kept_s = min(self.kept_s, IDLE_S) if is_idle else self.kept_s
        return not self.running and (self.requests > 0 or now < self.active_at + kept_s)

    def count(self, requests: int, now: float) -> None:
        """Count requests that come, or go if negative."""
        session: Session | None = self
        while session is not None:
            session.requests += requests
            session.active_at = now
            session = session.parent


class Sessions:
    """The sessions of one worker: those of the last `SILENCE_S_MAX`, at most `SESSIONS_MAX`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._named: OrderedDict[str, Session] = OrderedDict()

    def join(self, name: str, parent: str, now: float) -> Session:
        """Return the session of a request that comes. `name` empty: one of its own."""
        if name:
            session = self._get(name, self._get(parent, None, now) if parent else None, now)
        else:
            session = Session(next(self._numbers))
        session.count(1, now)
        return session

    def kept_bytes(self, now: float, *, is_idle: bool) -> Callable[[Session], int]:
        """Return a function to the bytes that sessions older than one keep now. `is_idle`: no row runs."""
        kept = [session for session in self._named.values() if session.is_kept(now, is_idle=is_idle)]
        return lambda young: sum(session.nbytes for session in kept if session.number < young.number)

    def _get(self, name: str, parent: Session | None, now: float) -> Session:
        session = self._named.get(name)
        if session is None or (not session.requests and now - session.active_at > SILENCE_S_MAX):
            session = Session(next(self._numbers) if parent is None else parent.number, parent)
            self._named[name] = session
        self._named.move_to_end(name)
        if len(self._named) > SESSIONS_MAX:
            self._named.popitem(last=False)
        return session
