"""What the supervisor decides, without processes and without a clock of its own.

Events go in, decisions come out (`events`), and `status` is set once when all is over. A child is in one
of seven states:

    PARKED    is not wanted                       -> WAITING when it is, GONE when everything stops
    FAILED    is left alone until `due`           -> PARKED, or WAITING, when due; GONE when everything stops
    WAITING   starts at `due`                     -> RUNNING when due, PARKED when not wanted any more, GONE
    RUNNING   since `since`                       -> WAITING, FAILED or GONE when it dies, ENDING when its
                                                     turn comes or it is not wanted any more
    ENDING    told to end, killed at `due`        -> GONE or PARKED when it dies, KILLED when due
    KILLED    SIGKILL sent, given up on at `due`  -> GONE or PARKED when it dies or when due
    GONE      will not run again

Some children run on demand: `Wanted` says which. When one of them cannot be kept alive it has FAILED, which
is its own affair, as it is that of a replica while another one runs; when another child cannot, everything
stops.

A reload (`ReloadAsked`) brings a successor of one child, either beside it, under the other of its two names,
and ends the old one when the successor serves; or behind it, under the same name. Until the successor serves
its death is no more than the end of the reload, and the old one stays. In a swap, the old one is *leaving*
before it is told to end: until it is said to be `Idle`, or its time is up.

A child that is due may be given the *spare* (`spares`) instead of a process of its own. One that cannot come
back as it was may be run in another way (`falls`).

What must always hold: a child is started only when it does not run; once a stop has begun none is started;
children end in the order given, each when the one before it is GONE; all are GONE before `status` is set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from deploy.supervisor.children import LIFELESS, TIMED, Children, Entry, Reload, State
from deploy.supervisor.events import (
    Decision,
    Died,
    Ends,
    Event,
    Idle,
    NotStarted,
    ReloadAsked,
    Reloaded,
    Report,
    Said,
    Serving,
    StopAsked,
    Wanted,
    describe,
    reason_of,
)
from deploy.supervisor.falls import Falls
from deploy.supervisor.restarts import RestartPolicy
from deploy.supervisor.spares import SPARE, Spares
from protocol.orders import Stage
from protocol.settings import EXIT_CONFIGURATION

EXIT_STOPPED = 0
EXIT_GAVE_UP = 1

FAILED_S = 60.0
"""So long a child that cannot be kept alive is left alone, if it is one that runs on demand."""
LEAVE_S_MAX = 600.0
"""So long one that is leaving gets until it is told to end, whatever it still has to do."""


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
        falls: Falls | None = None,
    ) -> None:
        """`drain_timeout_s`: what a child gets on top of `stop_timeout_s` to end while others go on.
        `on_demand`: children that run when they are `wanted`, each with a policy of its own. `replicas`:
        groups of those that stand in for each other. `loading`: those that say when they have loaded what
        they serve."""
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
        self._falls = falls or Falls({})
        for name in self._on_demand.keys() - self._wanted:
            self._children[name].state = State.PARKED
        self._policy = policy
        self._replicas = replicas
        self._of_replicas = {name: RestartPolicy(policy.limits) for names in replicas for name in names}
        self._ready_timeout_s = ready_timeout_s
        self._reload: Reload | None = None
        self._asked = False
        self._stopping_with: int | None = None
        self.status: int | None = None
        self._ends: dict[str, Ends] = {}

    def states(self) -> dict[str, State]:
        return {entry.name: entry.state for entry in self._children}

    def ends(self, *children: str) -> Ends:
        """How often a process of these children has ended that was not told to, and how the last one did."""
        ends = [self._ends[child] for child in children if child in self._ends]
        last = max(ends, key=lambda each: each.at, default=Ends())
        return replace(last, count=sum(each.count for each in ends))

    def stage(self, *children: str) -> Stage:
        """How a child stands, under whichever name; of several, the one that stands best."""
        return self._children.stage(*children)

    def leaving(self) -> set[str]:
        """Those that are to end as soon as they have nothing to do, by name."""
        return {entry.name for entry in self._children if entry.leaving}

    def wake_at(self) -> float | None:
        """When `handle` must be called again though nothing has happened; None: not before something does."""
        if self._stopping_with is not None:  # whose turn has not come has no other time
            turn = self._children.first_not_gone()
            return turn.due if turn is not None else None
        due = [entry.due for entry in self._children if entry.state in TIMED or entry.leaving]
        if self._reload is not None and not self._reload.serving:
            due.append(self._reload.due)
        return min([*due, *self._spares.wake_at(), *self._falls.wake_at()], default=None)

    def handle(self, event: Event | None, now: float) -> list[Decision]:
        """What is to be done now, in this order."""
        decisions = self._take(event, now)
        if self._stopping_with is not None:
            decisions += self._end_reload(False, "everything stops")
            return [*decisions, *self._spares.end(), *self._stop_next(now)]
        decisions += self._end_retired(now)
        decisions += self._watch_reload(now)
        decisions += self._follow_wanted(now)
        decisions += self._falls.follow(self._children, now)
        self._revive(now)
        starts = [(entry.name, entry.child) for entry in self._children.start_due(now)]
        decisions += self._spares.hand_out(starts, now)
        settled = self._reload is None and self._children.are_settled()
        return [*decisions, *self._spares.follow(now, settled=settled)]

    def _take(self, event: Event | None, now: float) -> list[Decision]:
        match event:
            case Died() | NotStarted():
                return self._ended(event, now)
            case StopAsked():
                return self._stop_asked(event, now)
            case ReloadAsked():
                return self._reload_asked(event, now)
            case Serving(name):
                return self._serves(name, now)
            case Said():
                return self._said(event, now)
            case Idle(name):
                entry = self._children.get(name)
                return self._children.retire(entry, now) if entry is not None and entry.leaving else []
            case Wanted(names):
                self._wanted = names
            case None:
                pass
        return []

    def _said(self, event: Said, now: float) -> list[Decision]:
        entry = self._children.get(event.name)
        if event.word == "loaded" and entry is not None and entry.state is State.RUNNING:
            entry.loaded_at = now
            self._falls.loaded(entry.child)
        return self._spares.said(event)

    def _ended(self, event: Died | NotStarted, now: float) -> list[Decision]:
        if event.name == SPARE:
            return self._spares.ended(event, now)
        in_vain = self._spares.refused(event.name)
        entry = self._children.get(event.name)
        if entry is None or entry.state in LIFELESS:
            return []  # given up on after SIGKILL, and dead at last
        what = describe(event, now - entry.since)
        if self._stopping_with is not None:
            entry.state, entry.leaving = State.GONE, False
            return [Report(what)]
        if entry.retired or entry.leaving:
            return [Report(what), *self._retired(entry, now)]
        if in_vain:
            entry.state, entry.due = State.WAITING, now
            return [Report(f"{what}; it was the spare, and starts in the old way", logging.WARNING)]
        if self._falls.has_landed(entry, now):
            return [Report(what)]
        reload, failed = self._reload, list[Decision]()
        if reload is not None and reload.new == entry.name and not reload.serving:
            failed = self._end_reload(False, f"the new process did not get ready: {what}")
            if reload.beside:
                self._children.drop(entry)
                return failed
            if reload.swap:  # what was there before was all right
                entry.state, entry.due = State.WAITING, now
                return failed
        return [*failed, *self._restart(entry, event, what, now)]

    def _restart(self, entry: Entry, event: Died | NotStarted, what: str, now: float) -> list[Decision]:
        is_hopeless = isinstance(event, Died) and event.returncode == EXIT_CONFIGURATION
        if is_hopeless and self._falls.may_fall(entry.child):
            return [Report(what, logging.WARNING), *self._falls.fall(entry, "a restart cannot help", now)]
        if is_hopeless:
            return self._give_up(entry, f"{what}; a restart cannot help", EXIT_CONFIGURATION, now)
        count = self.ends(entry.child).count + 1
        self._ends[entry.child] = Ends(count, what, reason_of(event), at=now)
        policy = self._on_demand.get(entry.child) or self._of_replicas.get(entry.child, self._policy)
        self._falls.died(entry.child, now)
        delay_s = policy.died(entry.name, entry.useful_s(now), now)
        if delay_s is None and self._falls.may_fall(entry.child):
            return [Report(what, logging.WARNING), *self._falls.fall(entry, "it dies too often", now)]
        if delay_s is None:
            why = f"more than {policy.limits.deaths_max} ends within {policy.limits.window_s:g} s, giving up"
            return self._give_up(entry, f"{what}; {why}", EXIT_GAVE_UP, now)
        entry.state, entry.due = State.WAITING, now + delay_s
        when = f"in {delay_s:g} s" if delay_s else "at once"
        return [Report(f"{what}; starts again {when}", logging.WARNING)]

    def _give_up(self, entry: Entry, why: str, status: int, now: float) -> list[Decision]:
        if entry.child in self._on_demand or self._has_company(entry):
            entry.state, entry.due = State.FAILED, now + FAILED_S
            return [Report(f"{why}; it is left alone for {FAILED_S:g} s", logging.ERROR)]
        entry.state = State.GONE
        self._stopping_with = status
        return [Report(f"{why}, everything stops", logging.ERROR)]

    def _has_company(self, entry: Entry) -> bool:
        """Another replica serves what it served."""
        others = [
            name for names in self._replicas if entry.child in names for name in names if name != entry.child
        ]
        return self._children.stage(*others) == "running"

    def _revive(self, now: float) -> None:
        """Replicas that were left alone for long enough."""
        for entry in self._children:
            if entry.state is State.FAILED and now >= entry.due and entry.child not in self._on_demand:
                entry.state, entry.due = State.WAITING, now

    # --- on demand ---

    def _follow_wanted(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for entry in self._children:
            if entry.child not in self._on_demand or self._is_in_reload(entry.child):
                continue
            if entry.state is State.FAILED and now >= entry.due:
                entry.state = State.PARKED
            wanted = entry.child in self._wanted
            if entry.state is State.PARKED and wanted:
                entry.state, entry.due = State.WAITING, now
            elif entry.state is State.WAITING and not wanted:
                entry.state = State.PARKED
            elif entry.state is State.RUNNING and not wanted:
                decisions.append(Report(f"{entry.name} is not needed just now"))
                decisions += self._children.retire(entry, now)
        return decisions

    def _is_in_reload(self, child: str) -> bool:
        return self._reload is not None and self._children[self._reload.new].child == child

    # --- reload ---

    def _reload_asked(self, event: ReloadAsked, now: float) -> list[Decision]:
        if self._stopping_with is not None:
            return [Reloaded(False, "everything stops")]
        entry = self._children.get(event.name)
        if self._reload is not None or (entry and any(e.retired for e in self._children.of(entry.child))):
            return [Reloaded(False, "a reload is under way")]
        if entry is not None and entry.state in (State.PARKED, State.FAILED):
            entry.state, entry.due = State.PARKED if entry.child in self._on_demand else State.FAILED, now
            return [Reloaded(True, f"{entry.name} does not run; what starts next is new")]
        if entry is None or entry.state is not State.RUNNING:
            return [Reloaded(False, f"{event.name} does not run just now; it is started anyway")]
        if not event.beside:
            self._reload = Reload(entry.name, entry.name, math.inf, event.swap, event.plans)
            return [Report(f"reload: {entry.name} ends first, for lack of memory"), *self._part(entry, now)]
        new = self._children.add_successor(entry, now).name
        due = now + self._ready_timeout_s
        self._reload = Reload(entry.name, new, due, event.swap, event.plans)
        return [Report(f"reload: {new} starts beside {entry.name}")]

    def _part(self, entry: Entry, now: float) -> list[Decision]:
        """With the old one: at once, unless nobody could go on with what it has."""
        if self._reload is None or not self._reload.swap:
            return self._children.retire(entry, now)
        entry.leaving, entry.due = True, now + LEAVE_S_MAX
        return [Report(f"reload: {entry.name} ends its requests")]

    def _serves(self, name: str, now: float) -> list[Decision]:
        reload = self._reload
        if reload is None or reload.serving or name != reload.new:
            return []
        new, old = self._children[name], self._children[reload.old]
        if new.state is not State.RUNNING or new.leaving:
            return []
        reload.serving = True
        self._falls.begin_anew(new.child, reload.plans)
        if not reload.beside:
            return self._end_reload(True, f"{name} ended, and runs anew")
        if old.state is State.RUNNING:
            return self._part(old, now)
        return self._retired(old, now)  # it has died meanwhile

    def _retired(self, entry: Entry, now: float) -> list[Decision]:
        """One that was told to end while the others go on is gone."""
        reload = self._reload
        entry.retired = entry.leaving = False
        if reload is not None and reload.old == reload.new == entry.name:
            entry.state, entry.due = State.WAITING, now
            reload.due = now + self._ready_timeout_s
            return []
        if len(self._children.of(entry.child)) == 1:
            parked = entry.child in self._on_demand
            entry.state, entry.due = State.PARKED if parked else State.WAITING, now
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
                if entry.state is State.GONE:
                    decisions += self._retired(entry, now)
        return decisions

    def _watch_reload(self, now: float) -> list[Decision]:
        """A successor that does not get ready in time is given up."""
        reload = self._reload
        if reload is None or reload.serving or now < reload.due:
            return []
        failed = self._end_reload(False, f"{reload.new} was not ready within {self._ready_timeout_s:g} s")
        new = self._children[reload.new]
        if reload.beside or (reload.swap and new.state is State.RUNNING):
            return [*failed, *self._children.retire(new, now)]
        return failed

    def _end_reload(self, done: bool, text: str) -> list[Decision]:
        if self._reload is None:
            return []
        self._reload = None
        return [Report(f"reload: {text}", logging.INFO if done else logging.ERROR), Reloaded(done, text)]

    # --- the end ---

    def _stop_asked(self, event: StopAsked, now: float) -> list[Decision]:
        # A stop that we began ourselves is not yet an order to hurry: only the second asking is.
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
