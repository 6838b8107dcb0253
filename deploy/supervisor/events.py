"""Events that happen to children, and decisions about them: the interface of the supervisor's core."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field

from protocol.supervisor_messages import Word


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a child has ended and is reaped; `returncode` as in `subprocess`.

    `words`: its last line on stderr, if any. `about`: the content of its breadcrumb slot, if it wrote one.
    """

    name: str
    pid: int
    returncode: int
    words: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The process of a child could not be started."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Stop everything; if repeated, at once."""

    by: str


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """Replace this child's process. `beside`: start the new one while the old one still runs.

    `swap`: the new process cannot continue the requests of the old one, so the old one must finish them.
    `plans`: the number of fallbacks that the new process has.
    """

    name: str
    beside: bool
    swap: bool = False
    plans: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """This child has begun to serve. `other`: it cannot continue the requests of the process that it replaces
    in a reload, because the content of its model is another."""

    name: str
    other: bool = False


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """The process of this child, or the spare, has reported its state."""

    name: str
    pid: int
    word: Word


@dataclass(frozen=True, slots=True)
class Idle:
    """This leaving child has no requests left."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelsWanted:
    """The on-demand children that should run."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class WorkersIdle:
    """The workers have used hardly any CPU time of late."""


Event = (
    Died | NotStarted | StopAsked | ReloadAsked | Serving | ChildMessage | Idle | ModelsWanted | WorkersIdle
)


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class AssignSpare:
    """The spare becomes the process of this child."""

    name: str


@dataclass(frozen=True, slots=True)
class UseFallback:
    """Run this child by its next plan from now on."""

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
    """Result of a reload, for the client that ordered it."""

    done: bool
    text: str


Decision = Start | AssignSpare | UseFallback | Terminate | Kill | Report | Reloaded


@dataclass(frozen=True, slots=True)
class ExitStats:
    """Statistics of a child's unexpected exits. `last`: the last one in a sentence; `reason`: the same as a
    code; `failure`: why the last start failed, empty after a successful one; `at`: its time."""

    count: int = 0
    last: str = ""
    reason: str = ""
    failure: str = ""
    at: float = field(default=0.0, compare=False)


def describe(event: Died | NotStarted, lived_s: float, *, quoted: bool = True) -> str:
    """Describe an exit in one line: process, cause, uptime, activity and, if `quoted`, last output."""
    if isinstance(event, NotStarted):
        return f"{event.name} could not be started: {event.reason}"
    child = f"{event.name} (pid {event.pid})"
    about = f", {event.about}" if event.about else ""
    details = f"{about}, last output {event.words!r}" if quoted and event.words else about
    if event.returncode < 0:
        name = _signal_name(-event.returncode)
        verb = "ended on" if name == "SIGTERM" else "was killed by"  # SIGTERM is how a normal stop begins
        return f"{child} {verb} {name} after {lived_s:.1f} s{details}"
    return f"{child} exited with status {event.returncode} after {lived_s:.1f} s{details}"


def reason_of(event: Died | NotStarted) -> str:
    """Return the cause of an exit as a code for programs: “sigkill”, “exit_1”, “not_started”."""
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
