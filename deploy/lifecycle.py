"""What the supervisor decides, without processes and without a clock of its own.

Events go in (`Died`, `NotStarted`, `StopAsked`, or none: time has passed), decisions come out (`Start`,
`Terminate`, `Kill`, `Report`), and `status` is set once when all is over. A child is in one of five states:

    WAITING   starts at `due`                     -> RUNNING when due, GONE when everything stops
    RUNNING   since `since`                       -> WAITING or GONE when it dies, ENDING when its turn comes
    ENDING    told to end, killed at `due`        -> GONE when it dies, KILLED when due
    KILLED    SIGKILL sent, given up on at `due`  -> GONE when it dies or when due
    GONE      will not run again

A reload (`ReloadAsked`) brings a successor of one child, either beside it, under the other of its two names,
and ends the old one when the successor serves; or behind it, under the same name. Until the successor serves
its death is no more than the end of the reload, and the old one stays.

What must always hold: a child is started only when it does not run; once a stop has begun none is started;
children end in the order given, each when the one before it is GONE; all are GONE before `status` is set.
"""

from __future__ import annotations

import enum
import logging
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.restarts import RestartPolicy
from protocol.settings import EXIT_CONFIGURATION

EXIT_STOPPED = 0
EXIT_GAVE_UP = 1

_SUCCESSOR = "-2"
KILL_WAIT_S_MAX = 5.0
"""A process that SIGKILL has not ended by then hangs in the kernel; waiting longer would hang us too."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a child has ended and is reaped; `returncode` as `subprocess` gives it.

    `words`: what it said of its end, if anything. `about`: what it was about, if it kept a logbook.
    """

    name: str
    pid: int
    returncode: int
    words: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The process of a child could not be started at all."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants everything to end. Asked again: at once."""

    by: str


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """Somebody wants another process in place of this child's. `beside`: while the old one still runs."""

    name: str
    beside: bool


@dataclass(frozen=True, slots=True)
class Serving:
    """This child has begun to serve."""

    name: str


Event = Died | NotStarted | StopAsked | ReloadAsked | Serving


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log, at a level of `logging`."""

    text: str
    level: int = logging.INFO


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The end of the reload that was asked for, good or bad: for the one who asked."""

    done: bool
    text: str


Decision = Start | Terminate | Kill | Report | Reloaded


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    KILLED = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class _Entry:
    name: str
    state: State
    since: float = 0.0
    due: float = 0.0
    retired: bool = False
    """Told to end, while the others go on."""


@dataclass(slots=True)
class _Reload:
    """`old` and `new` are one name when one comes after the other. `due`: when the successor must serve."""

    old: str
    new: str
    due: float
    serving: bool = False

    @property
    def beside(self) -> bool:
        return self.old != self.new


def other_name(name: str) -> str:
    """The name of a child's successor, and of that one's again."""
    return name.removesuffix(_SUCCESSOR) if name.endswith(_SUCCESSOR) else name + _SUCCESSOR


class Lifecycle:
    """The children of one supervisor, in the order in which they start and stop."""

    def __init__(
        self,
        names: Sequence[str],
        policy: RestartPolicy,
        *,
        stop_timeout_s: float,
        now: float,
        drain_timeout_s: float = 0.0,
        ready_timeout_s: float = 600.0,
    ) -> None:
        """`drain_timeout_s`: what a child that is reloaded gets on top of `stop_timeout_s` to end."""
        if len(set(names)) != len(names):
            raise ValueError(f"two children of one name: {', '.join(names)}")
        self._entries = {name: _Entry(name, State.WAITING, due=now) for name in names}
        self._policy = policy
        self._stop_timeout_s = stop_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._reload: _Reload | None = None
        self._asked = False
        self._stopping_with: int | None = None
        self.status: int | None = None

    def states(self) -> dict[str, State]:
        return {entry.name: entry.state for entry in self._entries.values()}

    def wake_at(self) -> float | None:
        """When `handle` must be called again though nothing has happened; None: not before something does."""
        timed = State.WAITING, State.ENDING, State.KILLED
        due = [entry.due for entry in self._entries.values() if entry.state in timed]
        if self._reload is not None and not self._reload.serving:
            due.append(self._reload.due)
        return min(due, default=None)

    def handle(self, event: Event | None, now: float) -> list[Decision]:
        """What is to be done now, in this order."""
        decisions: list[Decision] = []
        match event:
            case Died() | NotStarted():
                decisions += self._ended(event, now)
            case StopAsked():
                decisions += self._stop_asked(event, now)
            case ReloadAsked():
                decisions += self._reload_asked(event, now)
            case Serving(name):
                decisions += self._serves(name, now)
            case None:
                pass
        if self._stopping_with is None:
            decisions += [*self._end_retired(now), *self._watch_reload(now), *self._start_due(now)]
        else:
            decisions += [*self._end_reload(False, "everything stops"), *self._stop_next(now)]
        return decisions

    def _ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        entry = self._entries.get(event.name)
        if entry is None or entry.state in (State.GONE, State.WAITING):
            return []  # given up on after SIGKILL, and dead at last
        what = _describe(event, now - entry.since)
        if self._stopping_with is not None:
            entry.state = State.GONE
            return [Report(what)]
        if entry.retired:
            return [Report(what), *self._retired(entry, now)]
        if self._reload is not None and self._reload.new == entry.name and not self._reload.serving:
            beside = self._reload.beside
            failed = self._end_reload(False, f"the new process did not get ready: {what}")
            if beside:
                del self._entries[entry.name]
                return failed
            return [*failed, *self._restart(entry, event, what, now)]
        return self._restart(entry, event, what, now)

    def _restart(self, entry: _Entry, event: Died | NotStarted, what: str, now: float) -> list[Decision]:
        if isinstance(event, Died) and event.returncode == EXIT_CONFIGURATION:
            entry.state = State.GONE
            self._stopping_with = EXIT_CONFIGURATION
            return [Report(f"{what}; a restart cannot help, everything stops", logging.ERROR)]
        delay_s = self._policy.died(entry.name, now - entry.since, now)
        if delay_s is None:
            entry.state = State.GONE
            self._stopping_with = EXIT_GAVE_UP
            limits = self._policy.limits
            why = f"more than {limits.deaths_max} ends within {limits.window_s:g} s, giving up"
            return [Report(f"{what}; {why}", logging.ERROR)]
        entry.state, entry.due = State.WAITING, now + delay_s
        return [Report(f"{what}; starts again in {delay_s:g} s", logging.WARNING)]

    # --- reload ---

    def _reload_asked(self, event: ReloadAsked, now: float) -> list[Decision]:
        if self._reload is not None or any(entry.retired for entry in self._entries.values()):
            return [Reloaded(False, "a reload is under way")]
        if self._stopping_with is not None:
            return [Reloaded(False, "everything stops")]
        entry = self._entries.get(event.name)
        if entry is None or entry.state is not State.RUNNING:
            return [Reloaded(False, f"{event.name} does not run just now; it is started anyway")]
        if not event.beside:
            self._reload = _Reload(entry.name, entry.name, due=math.inf)
            return [Report(f"reload: {entry.name} ends first, for lack of memory"), *self._retire(entry, now)]
        new = other_name(entry.name)
        self._entries[new] = _Entry(new, State.WAITING, due=now)
        self._reload = _Reload(entry.name, new, due=now + self._ready_timeout_s)
        return [Report(f"reload: {new} starts beside {entry.name}")]

    def _retire(self, entry: _Entry, now: float) -> list[Decision]:
        entry.state, entry.retired = State.ENDING, True
        entry.due = now + self._grace_s(entry)
        return [Terminate(entry.name)]

    def _grace_s(self, entry: _Entry) -> float:
        return self._stop_timeout_s + (self._drain_timeout_s if entry.retired else 0.0)

    def _serves(self, name: str, now: float) -> list[Decision]:
        reload = self._reload
        if reload is None or reload.serving or name != reload.new:
            return []
        if self._entries[name].state is not State.RUNNING:
            return []
        reload.serving = True
        old = self._entries[reload.old]
        if not reload.beside:
            return self._end_reload(True, f"{name} ended, and runs anew")
        if old.state is State.RUNNING:
            return self._retire(old, now)
        return self._retired(old, now)  # it has died meanwhile

    def _retired(self, entry: _Entry, now: float) -> list[Decision]:
        """One that was told to end while the others go on is gone."""
        reload = self._reload
        if reload is not None and reload.old == reload.new == entry.name:
            entry.state, entry.retired, entry.due = State.WAITING, False, now
            reload.due = now + self._ready_timeout_s
            return []
        del self._entries[entry.name]
        if reload is None or reload.old != entry.name:
            return []
        return self._end_reload(True, f"{reload.new} has taken over from {reload.old}")

    def _end_retired(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for entry in [entry for entry in self._entries.values() if entry.retired]:
            decisions += self._stop_one(entry, now)
            if entry.state is State.GONE:
                decisions += self._retired(entry, now)
        return decisions

    def _watch_reload(self, now: float) -> list[Decision]:
        """A successor that does not get ready in time is given up."""
        reload = self._reload
        if reload is None or reload.serving or now < reload.due:
            return []
        failed = self._end_reload(False, f"{reload.new} was not ready within {self._ready_timeout_s:g} s")
        return [*failed, *(self._retire(self._entries[reload.new], now) if reload.beside else [])]

    def _end_reload(self, done: bool, text: str) -> list[Decision]:
        if self._reload is None:
            return []
        self._reload = None
        return [Report(f"reload: {text}", logging.INFO if done else logging.ERROR), Reloaded(done, text)]

    def _stop_asked(self, event: StopAsked, now: float) -> list[Decision]:
        # A stop that we began ourselves is not yet an order to hurry: only the second asking is.
        hurry, self._asked = self._asked, True
        if self._stopping_with is None:
            self._stopping_with = EXIT_STOPPED
        if not hurry:
            return [Report(f"{event.by}: stopping (again to stop at once)")]
        alive = [e for e in self._entries.values() if e.state in (State.RUNNING, State.ENDING)]
        for entry in alive:
            entry.state, entry.due = State.KILLED, now + KILL_WAIT_S_MAX
        return [Report(f"{event.by} again: stopping at once"), *(Kill(entry.name) for entry in alive)]

    def _start_due(self, now: float) -> list[Decision]:
        due = [e for e in self._entries.values() if e.state is State.WAITING and e.due <= now]
        for entry in due:
            entry.state, entry.since = State.RUNNING, now
        return [Start(entry.name) for entry in due]

    def _stop_next(self, now: float) -> list[Decision]:
        for entry in self._entries.values():
            if entry.state is State.WAITING:  # all of them now: their `due` must not wake us any more
                entry.state = State.GONE
        decisions: list[Decision] = []
        for entry in self._entries.values():
            decisions += self._stop_one(entry, now)
            if entry.state is not State.GONE:
                return decisions
        self.status = self._stopping_with
        return decisions

    def _stop_one(self, entry: _Entry, now: float) -> list[Decision]:
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


def _describe(event: Died | NotStarted, lived_s: float) -> str:
    if isinstance(event, NotStarted):
        return f"{event.name} could not be started: {event.reason}"
    child = f"{event.name} (pid {event.pid})"
    about = f", {event.about}" if event.about else ""
    said = f"{about}, saying {event.words!r}" if event.words else about
    if event.returncode < 0:
        return f"{child} was ended by {_signal_name(-event.returncode)} after {lived_s:.1f} s{said}"
    return f"{child} exited with status {event.returncode} after {lived_s:.1f} s{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
