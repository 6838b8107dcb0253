"""What happens to children, and what is to be done about it: the words between supervisor and core."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field

from protocol.orders import Word


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
    """Somebody wants another process in place of this child's. `beside`: while the old one still runs.

    `swap`: it will not be able to go on with the requests of the old one, which must end by themselves.
    `plans`: how many others are left to it then.
    """

    name: str
    beside: bool
    swap: bool = False
    plans: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """This child has begun to serve."""

    name: str


@dataclass(frozen=True, slots=True)
class Said:
    """The process of this child, or the spare, has said a word of itself."""

    name: str
    pid: int
    word: Word


@dataclass(frozen=True, slots=True)
class Idle:
    """This child, which is leaving, has no requests left."""

    name: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of the children that run on demand, these are to run."""

    names: frozenset[str]


Event = Died | NotStarted | StopAsked | ReloadAsked | Serving | Said | Idle | Wanted


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Give:
    """The spare becomes the process of this child."""

    name: str


@dataclass(frozen=True, slots=True)
class Fall:
    """Whatever starts for this child from now on is run by its next plan."""

    child: str


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


Decision = Start | Give | Fall | Terminate | Kill | Report | Reloaded


@dataclass(frozen=True, slots=True)
class Ends:
    """Of a child's processes that were not told to end. `last`: how the last one did, in a sentence; `reason`
    is that as a code, and `at` when it was."""

    count: int = 0
    last: str = ""
    reason: str = ""
    at: float = field(default=0.0, compare=False)


def describe(event: Died | NotStarted, lived_s: float) -> str:
    """A death in one line: who, how, after what life, with which words."""
    if isinstance(event, NotStarted):
        return f"{event.name} could not be started: {event.reason}"
    child = f"{event.name} (pid {event.pid})"
    about = f", {event.about}" if event.about else ""
    said = f"{about}, saying {event.words!r}" if event.words else about
    if event.returncode < 0:
        return f"{child} was ended by {_signal_name(-event.returncode)} after {lived_s:.1f} s{said}"
    return f"{child} exited with status {event.returncode} after {lived_s:.1f} s{said}"


def reason_of(event: Died | NotStarted) -> str:
    """The same as a code, for programs: `sigkill`, `exit_1`, `not_started`."""
    if isinstance(event, NotStarted):
        return "not_started"
    if event.returncode < 0:
        return _signal_name(-event.returncode).lower().replace(" ", "_")
    return f"exit_{event.returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
