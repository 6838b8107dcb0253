"""State of each child, and of a reload, in the supervisor's core. Pure.

A child has one entry under one of its two names, or two while one process takes over from another. It is
ended in steps: SIGTERM, SIGKILL after a timeout, and given up on if it survives that.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deploy.supervisor.events import Decision, Kill, Report, Terminate
from protocol.supervisor_messages import Stage

STOP_TIMEOUT_S = 15.0
KILL_WAIT_S_MAX = 5.0
"""A process that survives SIGKILL for this long hangs in the kernel; waiting longer would hang us too."""

_SUCCESSOR = "-2"


class ChildState(enum.Enum):
    PARKED = enum.auto()
    FAILED = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    KILLED = enum.auto()
    GONE = enum.auto()


LIFELESS = ChildState.PARKED, ChildState.FAILED, ChildState.WAITING, ChildState.GONE
TIMED = ChildState.FAILED, ChildState.WAITING, ChildState.ENDING, ChildState.KILLED


@dataclass(slots=True)
class ChildEntry:
    """A process of a child. `child`: the child's first name. `retired`: terminated while the others keep
    running. `leaving`: to be terminated as soon as it is idle. `loads`: ready only from `loaded_at` on."""

    name: str
    child: str
    state: ChildState
    since: float = 0.0
    due: float = 0.0
    retired: bool = False
    leaving: bool = False
    loads: bool = False
    loaded_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is not about to start, loading or ending."""
        if self.state is ChildState.RUNNING:
            return not (self.loads and self.loaded_at is None)
        return self.state in (ChildState.PARKED, ChildState.FAILED)

    def useful_s(self, now: float) -> float:
        """Return for how many seconds it has been ready, if it runs."""
        since = self.loaded_at if self.loads else self.since
        return 0.0 if since is None else now - since


@dataclass(slots=True)
class Reload:
    """A reload in progress. `old` equals `new` when the successor starts after the old process has ended.
    `due`: when the successor must serve."""

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
    """Return the other of a child's two names: its successor's, and for a successor the first again."""
    return name.removesuffix(_SUCCESSOR) if name.endswith(_SUCCESSOR) else name + _SUCCESSOR


class Children:
    """All children, in the order in which they start and stop."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        now: float,
        stop_timeout_s: float,
        drain_timeout_s: float,
        loading: Collection[str] = (),
    ) -> None:
        """`loading`: those that report when they have loaded their model."""
        if len(set(names)) != len(names):
            raise ValueError(f"two children have the same name: {', '.join(names)}")
        self._entries = {
            name: ChildEntry(name, name, ChildState.WAITING, due=now, loads=name in loading) for name in names
        }
        self._stop_timeout_s = stop_timeout_s
        self._drain_timeout_s = drain_timeout_s

    def __iter__(self) -> Iterator[ChildEntry]:
        """Iterate over a copy: the caller may add and drop entries."""
        return iter(list(self._entries.values()))

    def __getitem__(self, name: str) -> ChildEntry:
        return self._entries[name]

    def get(self, name: str) -> ChildEntry | None:
        return self._entries.get(name)

    def of(self, child: str) -> list[ChildEntry]:
        """Return the entries of a child: one, or two during a reload."""
        return [entry for entry in self if entry.child == child]

    def first_not_gone(self) -> ChildEntry | None:
        """Return the entry whose turn it is when all are stopped one after another."""
        return next((entry for entry in self if entry.state is not ChildState.GONE), None)

    def stage(self, *children: str) -> Stage:
        """Return the stage of a child under either name; of several children, the best."""
        entries = [entry for child in children for entry in self.of(child)]
        if any(entry.state in (ChildState.RUNNING, ChildState.WAITING) for entry in entries):
            return "running"
        if any(entry.state in (ChildState.ENDING, ChildState.KILLED) for entry in entries):
            return "ending"
        return "failed" if any(entry.state is ChildState.FAILED for entry in entries) else "parked"

    def is_loaded(self, *children: str) -> bool:
        """Return whether a process of these children runs that has loaded its model."""
        entries = [entry for child in children for entry in self.of(child)]
        return any(entry.state is ChildState.RUNNING and entry.loaded_at is not None for entry in entries)

    def are_settled(self) -> bool:
        """Return whether no child is about to start, loading or ending."""
        return all(entry.is_settled for entry in self)

    def add_successor(self, old: ChildEntry, now: float) -> ChildEntry:
        """Add the successor that starts beside `old`, under the other name."""
        name = other_name(old.name)
        new = ChildEntry(name, old.child, ChildState.WAITING, due=now, loads=old.loads)
        entries = list(self._entries.values())
        entries.insert(entries.index(old) + 1, new)  # it stops when the old one would have stopped
        self._entries = {entry.name: entry for entry in entries}
        return new

    def drop(self, entry: ChildEntry) -> None:
        del self._entries[entry.name]

    def start_due(self, now: float) -> list[ChildEntry]:
        """Mark as running, and return, the entries that are due to start."""
        due = [entry for entry in self if entry.state is ChildState.WAITING and entry.due <= now]
        for entry in due:
            entry.state, entry.since, entry.loaded_at = ChildState.RUNNING, now, None
        return due

    def retire(self, entry: ChildEntry, now: float) -> list[Decision]:
        """Terminate one child while the others keep running."""
        entry.retired, entry.leaving = True, False
        return self.end(entry, now)

    def end(self, entry: ChildEntry, now: float) -> list[Decision]:
        """Return the next step in ending `entry`, if one is due."""
        match entry.state:
            case ChildState.RUNNING:
                entry.state, entry.due = ChildState.ENDING, now + self._grace_s
                return [Terminate(entry.name)]
            case ChildState.ENDING if now >= entry.due:
                entry.state, entry.due = ChildState.KILLED, now + KILL_WAIT_S_MAX
                why = f"{entry.name} did not end within {self._grace_s:g} s: killing it"
                return [Report(why, logging.WARNING), Kill(entry.name)]
            case ChildState.KILLED if now >= entry.due:
                entry.state = ChildState.GONE
                return [Report(f"{entry.name} survived SIGKILL and is left running", logging.ERROR)]
            case _:
                pass
        return []

    def end_in_turn(self, now: float) -> list[Decision]:
        """Return the next step in stopping all children, each when the one before it is gone."""
        for entry in self:
            entry.leaving = False
            if entry.state in LIFELESS:  # all of these at once: their `due` must no longer wake us
                entry.state = ChildState.GONE
        decisions: list[Decision] = []
        for entry in self:
            decisions += self.end(entry, now)
            if entry.state is not ChildState.GONE:
                break
        return decisions

    def kill_all(self, now: float) -> list[Decision]:
        """Kill at once all children that have not ended."""
        alive = [entry for entry in self if entry.state in (ChildState.RUNNING, ChildState.ENDING)]
        for entry in alive:
            entry.state, entry.due = ChildState.KILLED, now + KILL_WAIT_S_MAX
        return [Kill(entry.name) for entry in alive]

    @property
    def _grace_s(self) -> float:
        return self._stop_timeout_s + self._drain_timeout_s
