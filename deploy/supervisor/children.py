"""What the supervisor's core keeps of each child, and of a reload. Pure.

A child is there under one of its two names, or under both while one process takes over from another. To end
one takes steps: it is told to, killed when its time is up, and given up on when even that does not help.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deploy.supervisor.events import Decision, Kill, Report, Terminate
from protocol.orders import Stage

KILL_WAIT_S_MAX = 5.0
"""A process that SIGKILL has not ended by then hangs in the kernel; waiting longer would hang us too."""

_SUCCESSOR = "-2"


class State(enum.Enum):
    PARKED = enum.auto()
    FAILED = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    KILLED = enum.auto()
    GONE = enum.auto()


LIFELESS = State.PARKED, State.FAILED, State.WAITING, State.GONE
TIMED = State.FAILED, State.WAITING, State.ENDING, State.KILLED


@dataclass(slots=True)
class Entry:
    """`child`: which of the children it is, under whichever of its names. `retired`: told to end, while the
    others go on. `leaving`: is to be told that as soon as it has nothing to do. `loads`: it is of use from
    `loaded_at` on, and not before."""

    name: str
    child: str
    state: State
    since: float = 0.0
    due: float = 0.0
    retired: bool = False
    leaving: bool = False
    loads: bool = False
    loaded_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """It is not about to start, to load or to end."""
        if self.state is State.RUNNING:
            return not (self.loads and self.loaded_at is None)
        return self.state in (State.PARKED, State.FAILED)

    def useful_s(self, now: float) -> float:
        """How long it has been of use, if it runs."""
        since = self.loaded_at if self.loads else self.since
        return 0.0 if since is None else now - since


@dataclass(slots=True)
class Reload:
    """`old` and `new` are one name when one comes after the other. `due`: when the successor must serve."""

    old: str
    new: str
    due: float
    swap: bool
    plans: int = 0
    serving: bool = False

    @property
    def beside(self) -> bool:
        return self.old != self.new


def other_name(name: str) -> str:
    """The name of a child's successor, and of that one's again."""
    return name.removesuffix(_SUCCESSOR) if name.endswith(_SUCCESSOR) else name + _SUCCESSOR


class Children:
    """All of them, in the order in which they start and stop."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        now: float,
        stop_timeout_s: float,
        drain_timeout_s: float,
        loading: Collection[str] = (),
    ) -> None:
        """`loading`: those that say when they have loaded what they serve."""
        if len(set(names)) != len(names):
            raise ValueError(f"two children of one name: {', '.join(names)}")
        self._entries = {
            name: Entry(name, name, State.WAITING, due=now, loads=name in loading) for name in names
        }
        self._stop_timeout_s = stop_timeout_s
        self._drain_timeout_s = drain_timeout_s

    def __iter__(self) -> Iterator[Entry]:
        """As they are now: whoever looks at them may add and drop some."""
        return iter(list(self._entries.values()))

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def of(self, child: str) -> list[Entry]:
        """A child, under whichever of its names: one, or two."""
        return [entry for entry in self if entry.child == child]

    def first_not_gone(self) -> Entry | None:
        """Whose turn it is when all end, one after another."""
        return next((entry for entry in self if entry.state is not State.GONE), None)

    def stage(self, *children: str) -> Stage:
        """How a child stands, under whichever name; of several, the one that stands best."""
        entries = [entry for child in children for entry in self.of(child)]
        if any(entry.state in (State.RUNNING, State.WAITING) for entry in entries):
            return "running"
        if any(entry.state in (State.ENDING, State.KILLED) for entry in entries):
            return "ending"
        return "failed" if any(entry.state is State.FAILED for entry in entries) else "parked"

    def are_settled(self) -> bool:
        """Nobody is about to start, to load or to end."""
        return all(entry.is_settled for entry in self)

    def add_successor(self, old: Entry, now: float) -> Entry:
        """One that is to start beside it, under the other name."""
        name = other_name(old.name)
        self._entries[name] = Entry(name, old.child, State.WAITING, due=now, loads=old.loads)
        return self._entries[name]

    def drop(self, entry: Entry) -> None:
        del self._entries[entry.name]

    def start_due(self, now: float) -> list[Entry]:
        """Those that are to start now, and count as running."""
        due = [entry for entry in self if entry.state is State.WAITING and entry.due <= now]
        for entry in due:
            entry.state, entry.since, entry.loaded_at = State.RUNNING, now, None
        return due

    def retire(self, entry: Entry, now: float) -> list[Decision]:
        """Tell one that runs to end, while the others go on."""
        entry.retired, entry.leaving = True, False
        return self.end(entry, now)

    def end(self, entry: Entry, now: float) -> list[Decision]:
        """The next step towards its end, if it is time for one."""
        match entry.state:
            case State.RUNNING:
                entry.state, entry.due = State.ENDING, now + self._grace_s(entry)
                return [Terminate(entry.name)]
            case State.ENDING if now >= entry.due:
                entry.state, entry.due = State.KILLED, now + KILL_WAIT_S_MAX
                why = f"{entry.name} did not end within {self._grace_s(entry):g} s: killing it"
                return [Report(why, logging.WARNING), Kill(entry.name)]
            case State.KILLED if now >= entry.due:
                entry.state = State.GONE
                return [Report(f"{entry.name} outlives SIGKILL and is left behind", logging.ERROR)]
            case _:
                pass
        return []

    def end_in_turn(self, now: float) -> list[Decision]:
        """The next step towards the end of all, each when the one before it is gone."""
        for entry in self:
            entry.leaving = False
            if entry.state in LIFELESS:  # all of them now: their `due` must not wake us any more
                entry.state = State.GONE
        decisions: list[Decision] = []
        for entry in self:
            decisions += self.end(entry, now)
            if entry.state is not State.GONE:
                break
        return decisions

    def kill_all(self, now: float) -> list[Decision]:
        """Those that have not ended, at once."""
        alive = [entry for entry in self if entry.state in (State.RUNNING, State.ENDING)]
        for entry in alive:
            entry.state, entry.due = State.KILLED, now + KILL_WAIT_S_MAX
        return [Kill(entry.name) for entry in alive]

    def _grace_s(self, entry: Entry) -> float:
        return self._stop_timeout_s + (self._drain_timeout_s if entry.retired else 0.0)
