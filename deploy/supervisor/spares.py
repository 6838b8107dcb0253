"""What the supervisor's core decides about the spare. Pure.

The spare is a process like a worker's that has imported everything and waits to be told what it is. There is
one at the most. It is begun when nobody is about to start, to load or to end, so that it takes nothing from
those; given to the next child that starts and could be it; and begun anew when it dies. One that is not there
yet is given to nobody: it works at low priority, and would make a child wait.

A child that was given the spare has a moment to say that it has taken what it was told. A spare that cannot
is worth nothing, and costs nothing: the child is started in the old way.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Sequence

from deploy.supervisor.events import Decision, Died, Give, Kill, NotStarted, Report, Said, Start, describe
from deploy.supervisor.restarts import RestartPolicy

SPARE = "spare"
"""Its name, in place of a child's."""
TAKE_S_MAX = 2.0
"""Within that time it must have taken what it was told."""


class Stage(enum.Enum):
    NONE = enum.auto()
    BEGUN = enum.auto()
    THERE = enum.auto()


class Spares:
    """The spare of one supervisor."""

    def __init__(self, takers: Collection[str], policy: RestartPolicy) -> None:
        """`takers`: the children that it can become; none: there is no spare. `policy`: of it alone."""
        self._takers = takers
        self._policy = policy
        self._since = 0.0
        self._begins_at: float | None = None
        """Not before that time; None: as soon as it can."""
        self._given: tuple[str, float] | None = None
        """Who was given it, and by when that one must have taken it."""
        self.stage = Stage.NONE

    def wake_at(self) -> list[float]:
        """When time alone changes something."""
        due = [self._begins_at, self._given[1] if self._given else None]
        return [at for at in due if at is not None]

    def said(self, event: Said) -> list[Decision]:
        """It is there, or a child that was given it has taken what it was told."""
        if self._given is not None and self._given[0] == event.name:
            self._given = None
        if event.name != SPARE or event.word != "there" or self.stage is not Stage.BEGUN:
            return []
        self.stage = Stage.THERE
        return [Report(f"spare is there as pid {event.pid}")]

    def ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        """It has died while it waited."""
        if self.stage is Stage.NONE:
            return []  # it was given to somebody who could not be told any more
        lived_s = now - self._since if self.stage is Stage.THERE else 0.0
        self.stage = Stage.NONE
        what = describe(event, now - self._since)
        delay_s = self._policy.died(SPARE, lived_s, now)
        if delay_s is None:
            self._takers = ()
            return [Report(f"{what}; workers start without one from now on", logging.ERROR)]
        self._begins_at = now + delay_s
        return [Report(f"{what}; another one takes its place", logging.WARNING)]

    def refused(self, name: str) -> bool:
        """Whether a child that has ended was given it, and had not taken what it was told."""
        if self._given is None or self._given[0] != name:
            return False
        self._given = None
        return True

    def hand_out(self, starts: Sequence[tuple[str, str]], now: float) -> list[Decision]:
        """How those are started, each under a name, that are due: the first whose child it can become gets
        the spare."""
        decisions: list[Decision] = []
        for name, child in starts:
            if self.stage is Stage.THERE and child in self._takers:
                self.stage, self._given = Stage.NONE, (name, now + TAKE_S_MAX)
                decisions.append(Give(name))
            else:
                decisions.append(Start(name))
        return decisions

    def follow(self, now: float, *, settled: bool) -> list[Decision]:
        """What time brings. `settled`: no child is about to start, to load or to end."""
        decisions: list[Decision] = []
        if self._given is not None and now >= self._given[1]:
            name = self._given[0]
            self._given = name, now + TAKE_S_MAX
            decisions += [Report(f"{name}: the spare does not answer", logging.WARNING), Kill(name)]
        if self._begins_at is not None and now >= self._begins_at:
            self._begins_at = None
        if self._takers and settled and self.stage is Stage.NONE and self._begins_at is None:
            self.stage, self._since = Stage.BEGUN, now
            decisions.append(Start(SPARE))
        return decisions

    def end(self) -> list[Decision]:
        """Everything stops: it has nothing to end in peace."""
        self._takers, self._given, self._begins_at = (), None, None
        if self.stage is Stage.NONE:
            return []
        self.stage = Stage.NONE
        return [Kill(SPARE)]
