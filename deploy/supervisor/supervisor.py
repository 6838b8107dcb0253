"""Runs the children that `lifecycle` decides about: processes, signals and the lifeline, in the foreground.

The main thread owns everything but the waiting: one thread per process sits in `wait` and puts the death in
the same queue as the threads that hear of signals, of orders from the control socket (`control`) and from the
gateway (`gatewayline`), so all that happens arrives at one place, one at a time.

What must always hold: when `run` returns, by whatever way, no child and nothing a child has started is left,
every descriptor opened here is closed and the signal handlers are those found. If this process is killed
outright, the write end of the lifeline closes with it and the children end themselves (`protocol.lifeline`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from deploy.serving.models import first_loaded, weight_bytes
from deploy.supervisor.child import Child
from deploy.supervisor.children import other_name
from deploy.supervisor.control import Control, Order
from deploy.supervisor.events import (
    Decision,
    Died,
    Event,
    Kill,
    NotStarted,
    Reloaded,
    Report,
    Serving,
    Spare,
    Start,
    Terminate,
    Wanted,
)
from deploy.supervisor.gatewayline import GatewayLine
from deploy.supervisor.lifecycle import KILL_WAIT_S_MAX, Lifecycle
from deploy.supervisor.reloading import Reloading, Reloads
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from deploy.supervisor.stderr import Stderr
from deploy.supervisor.stopsignals import stop_signals
from protocol import lifeline, logbook
from protocol.orderline import VARIABLE
from protocol.orders import ModelState, Orders, Roster

STOP_TIMEOUT_S = 15.0
WAKE_S_MAX = 60.0
MEASURE_S = 2.0
"""So often memory is measured, where models share a budget."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    waiter: threading.Thread


@dataclass(frozen=True, slots=True)
class _NextReload:
    """The turn of the next child that is to be reloaded has come."""


_Heard = Event | Order | Orders | _NextReload


class Supervisor:
    """Keeps `children` running until told to stop, and stops them in the order given.

    Where several of them serve models, those run as the gateway wants it, within `memory_budget` bytes.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        limits: RestartLimits | None = None,
        reloading: Reloading | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self._events: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._reloading = reloading
        self._memory_budget = memory_budget
        self._control: Control | None = None
        self._gateway: GatewayLine | None = None
        self._running: dict[str, _Running] = {}
        self._reloads = Reloads(children)
        self._models = {child.model.name: child.name for child in children if child.model is not None}
        self._on_demand = len(self._models) > 1
        limits = limits or RestartLimits()
        first = first_loaded([child.model for child in children if child.model is not None])
        self._lifecycle = Lifecycle(
            [child.name for child in children],
            RestartPolicy(limits),
            stop_timeout_s=stop_timeout_s,
            now=time.monotonic(),
            drain_timeout_s=reloading.drain_timeout_s if reloading else 0.0,
            ready_timeout_s=reloading.ready_timeout_s if reloading else 0.0,
            on_demand={n: RestartPolicy(limits) for n in self._models.values()} if self._on_demand else {},
            wanted=[self._models[model.name] for model in first],
        )

    def run(self) -> int:
        """The exit status: 0 after a requested stop, 78 for wrong settings, 1 when deaths came too fast.

        Once, and in the main thread: it takes SIGINT, SIGTERM and SIGHUP.
        """
        with stop_signals(self._events.put), self._control_open():
            reader, writer = os.pipe()  # close-on-exec, both: only the reader is handed over, by `pass_fds`
            try:
                return self._loop(reader)
            finally:
                self._leave_nothing()
                os.close(reader)
                os.close(writer)

    @contextlib.contextmanager
    def _control_open(self) -> Iterator[None]:
        if self._reloading is None:
            yield
            return
        try:
            self._control = Control(self._reloading.path, self._events.put)
        except OSError as error:
            log.warning("nothing can be reloaded: %s", error)
        try:
            yield
        finally:
            if self._control is not None:
                self._control.close()

    def _loop(self, line: int) -> int:
        events: Sequence[Event | None] = [None]
        while True:
            for event in events:
                for decision in self._lifecycle.handle(event, time.monotonic()):
                    self._carry_out(decision, line)
                if self._lifecycle.status is not None:
                    return self._lifecycle.status
            if self._gateway is not None:
                self._gateway.tell(self._roster())
            events = self._understood(self._next_event())

    # --- in ---

    def _next_event(self) -> _Heard | None:
        wake_at = self._lifecycle.wake_at()
        wait_s = WAKE_S_MAX if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            return self._events.get(timeout=min(wait_s, MEASURE_S if self._on_demand else WAKE_S_MAX))
        except queue.Empty:
            return None

    def _understood(self, heard: _Heard | None) -> Sequence[Event | None]:
        """As events, with the names of children in place of process ids. None: time has passed."""
        match heard:
            case Order():
                running = [name for name in self._models.values() if self._lifecycle.stage(name) == "running"]
                if refusal := self._reloads.begin(heard, running):
                    self._answer(False, refusal)
                    return [None]
                return [self._next_reload()]
            case _NextReload():
                return [self._next_reload()]
            case Orders():
                return self._ordered(heard)
            case Died(name, pid) if self._running[name].process.pid != pid:
                return [None]  # left behind after SIGKILL, and dead at last: another one bears its name
            case _:
                return [heard]

    def _ordered(self, orders: Orders) -> Sequence[Event | None]:
        names = {running.process.pid: name for name, running in self._running.items()}
        events: list[Event | None] = [Serving(names[pid]) for pid in orders.serving if pid in names]
        events += [Spare(names[pid]) for pid in orders.spare if pid in names]
        if orders.wanted is not None:
            events.append(Wanted(frozenset(self._models[m] for m in orders.wanted if m in self._models)))
        return events or [None]

    # --- reload ---

    def _next_reload(self) -> Event:
        child = self._reloads.next
        name = child if child in self._lifecycle.states() else other_name(child)
        runs = self._lifecycle.stage(child) == "running"
        needed = max(self._taken_bytes(child), self._reloads.needed_bytes)
        return self._reloads.ask(name, runs=runs, beside=not runs or self._fits(needed))

    def _fits(self, needed_bytes: int) -> bool:
        taken = sum(map(self._taken_bytes, self._models.values()))
        within = self._memory_budget is None or taken + needed_bytes <= self._memory_budget
        return within and (self._reloading is None or self._reloading.fits(needed_bytes))

    def _taken_bytes(self, child: str) -> int:
        """At least its weights, where it runs: those in a GPU's own memory are in no process's."""
        model = self._reloads.programs[child].model
        runs = self._lifecycle.stage(child) != "parked"
        weights = weight_bytes(model.model) if runs and model is not None else None
        return max(self._memory_bytes(child), weights or 0)

    def _reloaded(self, decision: Reloaded) -> None:
        answer = self._reloads.ended(decision.done, decision.text)
        if answer is None:
            self._events.put(_NextReload())
        else:
            self._answer(*answer)

    def _answer(self, done: bool, text: str) -> None:
        if self._control is not None:
            self._control.answer(done, text)

    # --- the gateway ---

    def _roster(self) -> Roster:
        return Roster(
            models=[self._model_state(name) for name in self._models.values()],
            on_demand=self._on_demand,
            memory_budget=self._memory_budget,
        )

    def _model_state(self, name: str) -> ModelState:
        stays = [n for n in (name, other_name(name)) if n in self._lifecycle.states()]
        model = self._reloads.programs[stays[-1]].model
        assert model is not None
        leaving = self._lifecycle.leaving()
        return ModelState(
            name=model.name,
            stage=self._lifecycle.stage(name),
            aliases=list(model.aliases),
            resident=model.resident,
            weight_bytes=weight_bytes(model.model) if self._on_demand else None,
            memory_bytes=self._memory_bytes(name) if self._on_demand else 0,
            leaving=[self._running[n].process.pid for n in stays if n in leaving],
        )

    def _memory_bytes(self, child: str) -> int:
        return sum(_resident_bytes(self._running.get(name)) for name in (child, other_name(child)))

    # --- processes ---

    def _carry_out(self, decision: Decision, line: int) -> None:
        match decision:
            case Start(name):
                self._start(name, self._reloads.programs[name], line)
            case Reloaded():
                self._reloaded(decision)
            case Terminate(name):
                self._running[name].process.terminate()
            case Kill(name):
                _kill_group(self._running[name].process.pid)
            case Report(text, level):
                log.log(level, "%s", text)

    def _start(self, name: str, child: Child, line: int) -> None:
        try:
            page = logbook.Page()
        except OSError as error:
            self._events.put(NotStarted(name, str(error)))
            return
        stderr = Stderr(name)
        inherited = {lifeline.VARIABLE: line, logbook.VARIABLE: page.fd}
        if child.hears:
            if self._gateway is not None:
                self._gateway.close()
            self._gateway = GatewayLine(self._events.put)
            inherited[VARIABLE] = self._gateway.theirs.fileno()
        try:
            process = subprocess.Popen(
                child.argv,
                env={**child.env, **{variable: str(fd) for variable, fd in inherited.items()}},
                stdin=subprocess.DEVNULL,
                stderr=stderr.writer,
                pass_fds=list(inherited.values()),
                # Its own session: Ctrl-C at the terminal reaches us alone, and we stop it in its turn.
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            page.close()
            self._events.put(NotStarted(name, str(error)))
            return
        finally:
            if child.hears and self._gateway is not None:
                self._gateway.theirs.close()
        log.info("%s runs as pid %d", name, process.pid)
        waiter = threading.Thread(
            target=self._await_end,
            args=(name, process, stderr, page),
            name=f"await-{name}",
            daemon=True,
        )
        self._running[name] = _Running(process, waiter)
        waiter.start()

    def _await_end(
        self, name: str, process: subprocess.Popen[bytes], stderr: Stderr, page: logbook.Page
    ) -> None:
        returncode = process.wait()
        # What it started must not outlive it: a helper could hold the GPU that the next worker needs. A
        # group id stays taken while anyone is in it, so the id just reaped does not name strangers yet.
        _kill_group(process.pid)
        self._events.put(Died(name, process.pid, returncode, stderr.close(), page.close()))

    def _leave_nothing(self) -> None:
        if self._gateway is not None:
            self._gateway.close()
        for running in self._running.values():
            if running.process.returncode is None:  # only after a mistake of ours
                _kill_group(running.process.pid)
            running.waiter.join(KILL_WAIT_S_MAX)


def _resident_bytes(running: _Running | None) -> int:
    """What a process holds of the machine's memory. The GPU's own, where it has some, is not in it."""
    if running is None or running.process.returncode is not None:
        return 0
    try:
        return int(psutil.Process(running.process.pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _kill_group(leader: int) -> None:
    # Gone already, or (macOS) nothing left in the group but zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
