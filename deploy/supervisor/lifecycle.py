"""State machine of the supervisor, without processes and without a clock of its own.

It turns events into decisions (`events`) and sets `status` once, when everything has ended. A child is in
one of seven states:

    PARKED    is not wanted                       -> WAITING when wanted, GONE when everything stops
    FAILED    is not restarted until `due`        -> PARKED, or WAITING, when due; GONE when everything stops
    WAITING   starts at `due`                     -> RUNNING when due, PARKED when no longer wanted, GONE
    RUNNING   since `since`                       -> WAITING, FAILED or GONE when it dies, ENDING when its
                                                     turn comes or it is no longer wanted
    ENDING    SIGTERM sent, killed at `due`       -> GONE or PARKED when it dies, KILLED when due
    KILLED    SIGKILL sent, given up on at `due`  -> GONE or PARKED when it dies or when due
    GONE      will not run again

Some children run on demand: `ModelsWanted` names those that should run. If one of them dies too often it is
FAILED and nothing else is affected. The same holds for a replica while another one runs. If any other child
dies too often, everything stops.

A reload (`ReloadAsked`) starts a successor of one child. It starts either beside the old process, under the
other of the child's two names, and the old one ends when the successor serves; or after the old process has
ended, under the same name. If the successor dies before it serves, only the reload ends, and the old process
stays. In a swap, the old process is *leaving* before it is terminated: until it is `Idle`, or times out.

A child that is due may get the *spare* (`spares`) instead of a new process. A child that cannot be restarted
as it was may be run by a fallback plan (`fallbacks`).

Invariants: a child is started only when it does not run; once a stop has begun none is started; children end
in the order given, each when the one before it is GONE; all are GONE before `status` is set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from deploy.supervisor.children import LIFELESS, TIMED, ChildEntry, Children, ChildState, Reload
from deploy.supervisor.events import (
    ChildMessage,
    Decision,
    Died,
    Event,
    ExitStats,
    Idle,
    ModelsWanted,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Report,
    Serving,
    StopAsked,
    WorkersIdle,
    describe,
    reason_of,
)
from deploy.supervisor.fallbacks import Fallbacks
from deploy.supervisor.restarts import RestartPolicy
from deploy.supervisor.spares import SPARE, Spares
from protocol.settings.reader import EXIT_CONFIGURATION
from protocol.supervisor_messages import Stage

EXIT_STOPPED = 0
EXIT_GAVE_UP = 1

FAILED_S = 60.0
"""Pause before a child that died too often is started again, if it runs on demand or has replicas."""
LEAVE_S_MAX = 600.0
"""Time after which a leaving child is terminated, whatever requests it still has."""


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
        on_demand: Mapping[str, RestartPolicy] | None = None,
        wanted: Collection[str] = (),
        replicas: Sequence[Collection[str]] = (),
        loading: Collection[str] = (),
        spares: Spares | None = None,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        """`drain_timeout_s`: that of the children; `stop_timeout_s` begins behind it.
        `on_demand`: children that run when they are `wanted`, each with a policy of its own. `replicas`:
        groups of children that serve the same model. `loading`: children that report when they have loaded
        their model."""
        self._on_demand = on_demand or {}
        self._wanted = frozenset(wanted)
        self._children = Children(
            names,
            now=now,
            stop_timeout_s=stop_timeout_s,
            drain_timeout_s=drain_timeout_s,
            loading=loading,
        )
        self._spares = spares or Spares((), policy)
        self._fallbacks = fallbacks or Fallbacks({})
        for name in self._on_demand.keys() - self._wanted:
            self._children[name].state = ChildState.PARKED
        self._policy = policy
        self._replicas = replicas
        self._of_replicas = {name: RestartPolicy(policy.limits) for names in replicas for name in names}
        self._ready_timeout_s = ready_timeout_s
        self._reload: Reload | None = None
        self._asked = False
        self._stopping_with: int | None = None
        self.status: int | None = None
        self._ends: dict[str, ExitStats] = {}

    def states(self) -> dict[str, ChildState]:
        return {entry.name: entry.state for entry in self._children}

    def ends(self, *children: str) -> ExitStats:
        """Return the number of unexpected exits of these children, and the last one."""
        ends = [self._ends[child] for child in children if child in self._ends]
        last = max(ends, key=lambda each: each.at, default=ExitStats())
        return replace(last, count=sum(each.count for each in ends))

    def stage(self, *children: str) -> Stage:
        """Return the stage of a child under either name; of several children, the best."""
        return self._children.stage(*children)

    def is_loaded(self, *children: str) -> bool:
        """Return whether one of these children runs and has loaded its model."""
        return self._children.is_loaded(*children)

    def leaving(self) -> set[str]:
        """Return the names of the processes that will end as soon as they are idle."""
        return {entry.name for entry in self._children if entry.leaving}

    @property
    def is_stopping(self) -> bool:
        """Whether everything stops, so that no child is started any more."""
        return self._stopping_with is not None

    @property
    def waits_for_idle(self) -> bool:
        """Whether `WorkersIdle` is wanted as soon as it is true."""
        return self._spares.waits_for_idle

    def wake_at(self) -> float | None:
        """Return when `handle` must be called without an event; None: only with the next event."""
        if self._stopping_with is not None:  # children whose turn has not come have no time of their own
            turn = self._children.first_not_gone()
            return turn.due if turn is not None else None
        due = [entry.due for entry in self._children if entry.state in TIMED or entry.leaving]
        if self._reload is not None and not self._reload.serving:
            due.append(self._reload.due)
        return min([*due, *self._spares.wake_at(), *self._fallbacks.wake_at()], default=None)

    def handle(self, event: Event | None, now: float) -> list[Decision]:
        """Return the decisions to carry out now, in this order."""
        decisions = self._take(event, now)
        if self._stopping_with is not None:
            decisions += self._end_reload(False, "the server is stopping")
            return [*decisions, *self._spares.end(), *self._stop_next(now)]
        decisions += self._end_retired(now)
        decisions += self._watch_reload(now)
        decisions += self._follow_wanted(now)
        decisions += self._fallbacks.follow(self._children, now)
        self._revive(now)
        starts = [(entry.name, entry.child) for entry in self._children.start_due(now)]
        decisions += self._spares.assign_spare(starts, now)
        settled = self._reload is None and self._children.are_settled()
        idle = isinstance(event, WorkersIdle)
        return [*decisions, *self._spares.follow(now, settled=settled, idle=idle)]

    def _take(self, event: Event | None, now: float) -> list[Decision]:
        match event:
            case Died() | NotStarted():
                return self._ended(event, now)
            case StopAsked():
                return self._stop_asked(event, now)
            case ReloadAsked():
                return self._reload_asked(event, now)
            case Serving():
                return self._serves(event, now)
            case ChildMessage():
                return self._on_child_message(event, now)
            case Idle(name):
                entry = self._children.get(name)
                return self._children.retire(entry, now) if entry is not None and entry.leaving else []
            case ModelsWanted(names):
                self._wanted = names
            case WorkersIdle() | None:
                pass
        return []

    def _on_child_message(self, event: ChildMessage, now: float) -> list[Decision]:
        entry = self._children.get(event.name)
        if event.word == "loaded" and entry is not None and entry.state is ChildState.RUNNING:
            entry.loaded_at = now
            self._fallbacks.loaded(entry.child)
            if (ends := self._ends.get(entry.child)) is not None:
                self._ends[entry.child] = replace(ends, failure="")
        return self._spares.on_message(event)

    def _ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        if event.name == SPARE:
            return self._spares.ended(event, now)
        in_vain = self._spares.refused(event.name)
        entry = self._children.get(event.name)
        if entry is None or entry.state in LIFELESS:
            return []  # it was given up on after SIGKILL, and has died since
        what = describe(event, now - entry.since)
        if self._stopping_with is not None:
            entry.state, entry.leaving = ChildState.GONE, False
            return [Report(what)]
        if entry.retired or entry.leaving:
            return [Report(what), *self._retired(entry, now)]
        if in_vain:
            entry.state, entry.due = ChildState.WAITING, now
            return [Report(f"{what}; it was the spare, starting a new process instead", logging.WARNING)]
        if self._fallbacks.is_serving(entry, now):
            return [Report(what)]
        reload, failed = self._reload, list[Decision]()
        if reload is not None and reload.new == entry.name and not reload.serving:
            failed = self._end_reload(False, f"the new process did not become ready: {what}")
            if reload.beside:
                self._children.drop(entry)
                return failed
            if reload.swap:  # the model before the swap worked
                entry.state, entry.due = ChildState.WAITING, now
                return failed
        return [*failed, *self._restart(entry, event, what, now)]

    def _restart(self, entry: ChildEntry, event: Died | NotStarted, what: str, now: float) -> list[Decision]:
        is_hopeless = isinstance(event, Died) and event.returncode == EXIT_CONFIGURATION
        has_failed = is_hopeless or (entry.loads and entry.loaded_at is None)
        self._count(entry, event, what, now, has_failed=has_failed)
        if is_hopeless:  # its last output says why, and is in the log already
            what = describe(event, now - entry.since, quoted=False)
        if is_hopeless and self._fallbacks.may_switch(entry.child):
            return [
                Report(what, logging.WARNING),
                *self._fallbacks.switch(entry, "a restart cannot help", now),
            ]
        if is_hopeless:
            return self._give_up(entry, f"{what}; a restart cannot help", EXIT_CONFIGURATION, now)
        policy = self._on_demand.get(entry.child) or self._of_replicas.get(entry.child, self._policy)
        self._fallbacks.died(entry.child, now)
        delay_s = policy.died(entry.name, entry.useful_s(now), now)
        if delay_s is None and self._fallbacks.may_switch(entry.child):
            return [Report(what, logging.WARNING), *self._fallbacks.switch(entry, "it died too often", now)]
        if delay_s is None:
            why = f"more than {policy.limits.deaths_max} exits within {policy.limits.window_s:g} s, giving up"
            return self._give_up(entry, f"{what}; {why}", EXIT_GAVE_UP, now)
        entry.state, entry.due = ChildState.WAITING, now + delay_s
        when = f"in {delay_s:g} s" if delay_s else "at once"
        return [Report(f"{what}; restarting {when}", logging.WARNING)]

    def _count(
        self, entry: ChildEntry, event: Died | NotStarted, what: str, now: float, *, has_failed: bool
    ) -> None:
        """Count an unexpected exit. `has_failed`: its start failed, rather than a process that served."""
        words = event.words if isinstance(event, Died) else ""
        failure = (words or what) if has_failed else ""
        count = self.ends(entry.child).count + 1
        self._ends[entry.child] = ExitStats(count, what, reason_of(event), failure, at=now)

    def _give_up(self, entry: ChildEntry, why: str, status: int, now: float) -> list[Decision]:
        if entry.child in self._on_demand or self._has_replicas(entry):
            ends = self._ends[entry.child]
            self._ends[entry.child] = replace(ends, failure=ends.failure or ends.last)
            entry.state, entry.due = ChildState.FAILED, now + FAILED_S
            return [Report(f"{why}; the next attempt is in {FAILED_S:g} s", logging.ERROR)]
        entry.state = ChildState.GONE
        self._stopping_with = status
        return [Report(f"{why}, stopping everything", logging.ERROR)]

    def _has_replicas(self, entry: ChildEntry) -> bool:
        """Return whether another replica of its model runs."""
        others = [
            name for names in self._replicas if entry.child in names for name in names if name != entry.child
        ]
        return self._children.stage(*others) == "running"

    def _revive(self, now: float) -> None:
        """Restart failed replicas whose pause is over."""
        for entry in self._children:
            if entry.state is ChildState.FAILED and now >= entry.due and entry.child not in self._on_demand:
                entry.state, entry.due = ChildState.WAITING, now

    # --- on demand ---

    def _follow_wanted(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for entry in self._children:
            if entry.child not in self._on_demand or self._is_in_reload(entry.child):
                continue
            if entry.state is ChildState.FAILED and now >= entry.due:
                entry.state = ChildState.PARKED
            wanted = entry.child in self._wanted
            if entry.state is ChildState.PARKED and wanted:
                entry.state, entry.due = ChildState.WAITING, now
            elif entry.state is ChildState.WAITING and not wanted:
                entry.state = ChildState.PARKED
            elif entry.state is ChildState.RUNNING and not wanted:
                decisions.append(Report(f"{entry.name} is not needed at present, stopping it"))
                decisions += self._children.retire(entry, now)
        return decisions

    def _is_in_reload(self, child: str) -> bool:
        return self._reload is not None and self._children[self._reload.new].child == child

    # --- reload ---

    def _reload_asked(self, event: ReloadAsked, now: float) -> list[Decision]:
        if self._stopping_with is not None:
            return [Reloaded(False, "the server is stopping")]
        entry = self._children.get(event.name)
        ends = entry is not None and any(e.retired or e.leaving for e in self._children.of(entry.child))
        if self._reload is not None or ends:
            return [Reloaded(False, "a reload is already in progress")]
        if entry is not None and entry.state in (ChildState.PARKED, ChildState.FAILED):
            entry.state, entry.due = (
                ChildState.PARKED if entry.child in self._on_demand else ChildState.FAILED,
                now,
            )
            return [Reloaded(True, f"{entry.name} is not running; its next start is a new process")]
        if entry is None or entry.state is not ChildState.RUNNING:
            return [Reloaded(False, f"{event.name} is not running at present; it is being started anyway")]
        if not event.beside:
            self._reload = Reload(entry.name, entry.name, math.inf, event.swap, event.plans)
            return [Report(f"reload: {entry.name} ends before the next one starts"), *self._part(entry, now)]
        new = self._children.add_successor(entry, now).name
        due = now + self._ready_timeout_s
        self._reload = Reload(entry.name, new, due, event.swap, event.plans)
        return [Report(f"reload: {new} starts beside {entry.name}")]

    def _part(self, entry: ChildEntry, now: float) -> list[Decision]:
        """End the old process: at once, or in a swap when its requests have finished."""
        if self._reload is None or not self._reload.swap:
            return self._children.retire(entry, now)
        entry.leaving, entry.due = True, now + LEAVE_S_MAX
        return [Report(f"reload: {entry.name} finishes its requests")]

    def _serves(self, event: Serving, now: float) -> list[Decision]:
        reload, name = self._reload, event.name
        if reload is None or reload.serving or name != reload.new:
            return []
        new, old = self._children[name], self._children[reload.old]
        if new.state is not ChildState.RUNNING or new.leaving:
            return []
        reload.serving = True
        reload.swap |= event.other
        self._fallbacks.reset(new.child, reload.plans)
        if not reload.beside:
            return self._end_reload(True, f"{name} was stopped and started again")
        if old.state is ChildState.RUNNING:
            return self._part(old, now)
        return self._retired(old, now)  # it has died in the meantime

    def _retired(self, entry: ChildEntry, now: float) -> list[Decision]:
        """Handle the end of a process that was terminated while the others keep running."""
        reload = self._reload
        entry.retired = entry.leaving = False
        if reload is not None and reload.old == reload.new == entry.name:
            entry.state, entry.due = ChildState.WAITING, now
            reload.due = now + self._ready_timeout_s
            return []
        if len(self._children.of(entry.child)) == 1:
            parked = entry.child in self._on_demand
            entry.state, entry.due = ChildState.PARKED if parked else ChildState.WAITING, now
            return []
        self._children.drop(entry)
        if reload is None or reload.old != entry.name:
            return []
        return self._end_reload(True, f"{reload.new} has taken over from {reload.old}")

    def _end_retired(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for entry in self._children:
            if entry.leaving and now >= entry.due:
                decisions += self._children.retire(entry, now)
            elif entry.retired:
                decisions += self._children.end(entry, now)
                if entry.state is ChildState.GONE:
                    decisions += self._retired(entry, now)
        return decisions

    def _watch_reload(self, now: float) -> list[Decision]:
        """Fail the reload when its successor is not ready in time."""
        reload = self._reload
        if reload is None or reload.serving or now < reload.due:
            return []
        failed = self._end_reload(False, f"{reload.new} was not ready within {self._ready_timeout_s:g} s")
        new = self._children[reload.new]
        if reload.beside or (reload.swap and new.state is ChildState.RUNNING):
            return [*failed, *self._children.retire(new, now)]
        return failed

    def _end_reload(self, done: bool, text: str) -> list[Decision]:
        if self._reload is None:
            return []
        self._reload = None
        return [Report(f"reload: {text}", logging.INFO if done else logging.ERROR), Reloaded(done, text)]

    # --- the end ---

    def _stop_asked(self, event: StopAsked, now: float) -> list[Decision]:
        # Only a second request means "at once": a stop that we began ourselves does not count.
        hurry, self._asked = self._asked, True
        if self._stopping_with is None:
            self._stopping_with = EXIT_STOPPED
        if not hurry:
            return [Report(f"{event.by}: stopping (again to stop at once)")]
        return [Report(f"{event.by} again: stopping at once"), *self._children.kill_all(now)]

    def _stop_next(self, now: float) -> list[Decision]:
        decisions = self._children.end_in_turn(now)
        if self._children.first_not_gone() is None:
            self.status = self._stopping_with
        return decisions
