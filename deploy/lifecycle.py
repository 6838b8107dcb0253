"""What the supervisor decides, without processes and without a clock of its own.

Events go in (`Died`, `NotStarted`, `StopAsked`, or none: time has passed), decisions come out (`Start`,
`Terminate`, `Kill`, `Report`), and `status` is set once when all is over. A child is in one of five states:

    WAITING   starts at `due`                     -> RUNNING when due, GONE when everything stops
    RUNNING   since `since`                       -> WAITING or GONE when it dies, ENDING when its turn comes
    ENDING    told to end, killed at `due`        -> GONE when it dies, KILLED when due
    KILLED    SIGKILL sent, given up on at `due`  -> GONE when it dies or when due
    GONE      will not run again

What must always hold: a child is started only when it does not run; once a stop has begun none is started;
children end in the order given, each when the one before it is GONE; all are GONE before `status` is set.
"""

from __future__ import annotations

import enum
import logging
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.settings import EXIT_CONFIGURATION

EXIT_STOPPED = 0
EXIT_GAVE_UP = 1

KILL_WAIT_S_MAX = 5.0
"""A process that SIGKILL has not ended by then hangs in the kernel; waiting longer would hang us too."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a child has ended and is reaped; `returncode` as `subprocess` gives it.

    `words`: what it said of its end, if anything.
    """

    name: str
    pid: int
    returncode: int
    words: str = ""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The process of a child could not be started at all."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants everything to end. Asked again: at once."""

    by: str


Event = Died | NotStarted | StopAsked


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


Decision = Start | Terminate | Kill | Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How soon, and how often at all, what died is started again."""

    delay_s: float = 0.2
    delay_s_max: float = 10.0
    stable_s: float = 60.0
    deaths_max: int = 10
    window_s: float = 300.0


class RestartPolicy:
    """When a child that died is started again: later each time, and not at all when deaths come too fast.

    The delay is each child's own and starts over once it has lived `stable_s`. Deaths are counted over all
    children: a system that keeps losing processes is broken as a whole, whichever of them dies.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._delays: dict[str, float] = {}
        self._deaths: deque[float] = deque(maxlen=limits.deaths_max + 1)

    def died(self, name: str, lived_s: float, now: float) -> float | None:
        """The seconds until its restart, or None: more than `deaths_max` deaths within `window_s`."""
        self._deaths.append(now)
        if len(self._deaths) > self.limits.deaths_max and now - self._deaths[0] <= self.limits.window_s:
            return None
        if lived_s >= self.limits.stable_s or name not in self._delays:
            self._delays[name] = self.limits.delay_s
        else:
            self._delays[name] = min(self.limits.delay_s_max, 2 * self._delays[name])
        return self._delays[name]


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


class Lifecycle:
    """The children of one supervisor, in the order in which they start and stop."""

    def __init__(
        self, names: Sequence[str], policy: RestartPolicy, *, stop_timeout_s: float, now: float
    ) -> None:
        if len(set(names)) != len(names):
            raise ValueError(f"two children of one name: {', '.join(names)}")
        self._entries = {name: _Entry(name, State.WAITING, due=now) for name in names}
        self._policy = policy
        self._stop_timeout_s = stop_timeout_s
        self._asked = False
        self._stopping_with: int | None = None
        self.status: int | None = None

    def states(self) -> dict[str, State]:
        return {entry.name: entry.state for entry in self._entries.values()}

    def wake_at(self) -> float | None:
        """When `handle` must be called again though nothing has happened; None: not before something does."""
        timed = State.WAITING, State.ENDING, State.KILLED
        return min((entry.due for entry in self._entries.values() if entry.state in timed), default=None)

    def handle(self, event: Event | None, now: float) -> list[Decision]:
        """What is to be done now, in this order."""
        decisions: list[Decision] = []
        match event:
            case Died() | NotStarted():
                decisions += self._ended(event, now)
            case StopAsked():
                decisions += self._stop_asked(event, now)
            case None:
                pass
        decisions += self._start_due(now) if self._stopping_with is None else self._stop_next(now)
        return decisions

    def _ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        entry = self._entries[event.name]
        if entry.state in (State.GONE, State.WAITING):
            return []  # given up on after SIGKILL, and dead at last
        what = _describe(event, now - entry.since)
        if self._stopping_with is not None:
            entry.state = State.GONE
            return [Report(what)]
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
                entry.state, entry.due = State.ENDING, now + self._stop_timeout_s
                return [Terminate(entry.name)]
            case State.ENDING if now >= entry.due:
                entry.state, entry.due = State.KILLED, now + KILL_WAIT_S_MAX
                why = f"{entry.name} did not end within {self._stop_timeout_s:g} s: killing it"
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
    said = f", saying {event.words!r}" if event.words else ""
    if event.returncode < 0:
        return f"{child} was ended by {_signal_name(-event.returncode)} after {lived_s:.1f} s{said}"
    return f"{child} exited with status {event.returncode} after {lived_s:.1f} s{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
