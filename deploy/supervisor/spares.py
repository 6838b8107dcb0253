"""Policy for the spare, in the supervisor's core. Pure.

The spare is a worker process that has imported everything and waits for its arguments. There is at most one.
It is started when no child is about to start, loading or ending, and the workers are idle, so that it takes
no resources from those. Workers that are never idle get it after `IDLE_WAIT_S_MAX`.
It is assigned to the next compatible child that starts, and restarted when it dies. A spare that is not ready
is not assigned: it runs at low priority, and would make a child wait.

A spare must confirm its arguments within `TAKE_S_MAX`. If it does not, it is killed and the child is started
as a new process.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Sequence

from deploy.supervisor.events import (
    AssignSpare,
    ChildMessage,
    Decision,
    Died,
    Kill,
    NotStarted,
    Report,
    Start,
    describe,
)
from deploy.supervisor.restarts import RestartPolicy

SPARE = "spare"
"""Name of the spare's process."""
TAKE_S_MAX = 2.0
"""Timeout for confirming its arguments."""
THERE_S_MAX = 600.0
"""Timeout for importing everything, at low priority on a machine that may be busy. A spare that hangs
would otherwise keep its memory and prevent another one."""
IDLE_WAIT_S_MAX = 30.0
"""Longest wait for idle workers. On two cores, importing takes a quarter of the speed of a burst beside it;
without a spare, a crash is a longer pause."""


class SpareStage(enum.Enum):
    NONE = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()


class Spares:
    """The spare of one supervisor."""

    def __init__(self, takers: Collection[str], policy: RestartPolicy) -> None:
        """`takers`: the children that it can become; empty: there is no spare. `policy`: its own restarts."""
        self._takers = takers
        self._policy = policy
        self._since = 0.0
        self._begins_at: float | None = None
        """Earliest time of the next start; None: as soon as possible."""
        self._given: tuple[str, float] | None = None
        """The name that it was assigned to, and the deadline of its confirmation."""
        self._there_by: float | None = None
        """Deadline for becoming ready; None: none is starting, or it was killed."""
        self._starts_by: float | None = None
        """Time of its start whether workers are idle or not; None: no start is due."""
        self.stage = SpareStage.NONE

    @property
    def waits_for_idle(self) -> bool:
        """Whether `follow` starts a spare as soon as the workers are idle."""
        return self._starts_by is not None

    def wake_at(self) -> list[float]:
        """Return the times at which `follow` must be called without an event."""
        due = [self._begins_at, self._given[1] if self._given else None, self._there_by, self._starts_by]
        return [at for at in due if at is not None]

    def on_message(self, event: ChildMessage) -> list[Decision]:
        """Handle a message: the spare is ready, or an assigned spare has confirmed its arguments."""
        if self._given is not None and self._given[0] == event.name:
            self._given = None
        if event.name != SPARE or event.word != "there" or self.stage is not SpareStage.STARTING:
            return []
        self.stage, self._there_by = SpareStage.READY, None
        return [Report(f"spare is ready as pid {event.pid}")]

    def ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        """Handle the death of the spare before it was assigned."""
        if self.stage is SpareStage.NONE:
            return []  # it was assigned, but its arguments could not be sent
        lived_s = now - self._since if self.stage is SpareStage.READY else 0.0
        self.stage, self._there_by = SpareStage.NONE, None
        what = describe(event, now - self._since)
        delay_s = self._policy.died(SPARE, lived_s, now)
        if delay_s is None:
            self._takers = ()
            return [Report(f"{what}; workers start without a spare from now on", logging.ERROR)]
        self._begins_at = now + delay_s
        return [Report(f"{what}; another spare will be started", logging.WARNING)]

    def refused(self, name: str) -> bool:
        """Return whether the ended process was the assigned spare, its arguments not yet confirmed."""
        if self._given is None or self._given[0] != name:
            return False
        self._given = None
        return True

    def assign_spare(self, starts: Sequence[tuple[str, str]], now: float) -> list[Decision]:
        """Return how to start `starts`, pairs of name and child: the first compatible one gets the spare."""
        decisions: list[Decision] = []
        for name, child in starts:
            if self.stage is SpareStage.READY and child in self._takers:
                self.stage, self._given = SpareStage.NONE, (name, now + TAKE_S_MAX)
                decisions.append(AssignSpare(name))
            else:
                decisions.append(Start(name))
        return decisions

    def follow(self, now: float, *, settled: bool, idle: bool = False) -> list[Decision]:
        """Check timeouts, and start a spare if due.

        `settled`: no child is starting, loading or ending. `idle`: the workers have nothing to do.
        """
        decisions: list[Decision] = []
        if self._given is not None and now >= self._given[1]:
            name = self._given[0]
            self._given = name, now + TAKE_S_MAX
            decisions += [Report(f"{name}: the spare does not respond", logging.WARNING), Kill(name)]
        if self._there_by is not None and now >= self._there_by:
            self._there_by = None
            message = f"the spare was not ready within {THERE_S_MAX:g} s: killing it"
            decisions += [Report(message, logging.WARNING), Kill(SPARE)]
        if self._begins_at is not None and now >= self._begins_at:
            self._begins_at = None
        if (
            not self._takers
            or not settled
            or self.stage is not SpareStage.NONE
            or self._begins_at is not None
        ):
            self._starts_by = None
            return decisions
        if self._starts_by is None:
            self._starts_by = now + IDLE_WAIT_S_MAX
        if idle or now >= self._starts_by:
            self.stage, self._since, self._there_by = SpareStage.STARTING, now, now + THERE_S_MAX
            self._starts_by = None
            decisions.append(Start(SPARE))
        return decisions

    def end(self) -> list[Decision]:
        """Kill the spare when everything stops: it has no requests to finish."""
        self._takers, self._given, self._begins_at, self._there_by = (), None, None, None
        self._starts_by = None
        if self.stage is SpareStage.NONE:
            return []
        self.stage = SpareStage.NONE
        return [Kill(SPARE)]
