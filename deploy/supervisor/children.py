"""What the supervisor's core keeps of each child, and of a reload."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
    others go on. `leaving`: is to be told that as soon as it has nothing to do."""

    name: str
    child: str
    state: State
    since: float = 0.0
    due: float = 0.0
    retired: bool = False
    leaving: bool = False


@dataclass(slots=True)
class Reload:
    """`old` and `new` are one name when one comes after the other. `due`: when the successor must serve."""

    old: str
    new: str
    due: float
    swap: bool
    serving: bool = False

    @property
    def beside(self) -> bool:
        return self.old != self.new


def other_name(name: str) -> str:
    """The name of a child's successor, and of that one's again."""
    return name.removesuffix(_SUCCESSOR) if name.endswith(_SUCCESSOR) else name + _SUCCESSOR
