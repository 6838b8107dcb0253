"""Foreground supervisor: carries out the decisions of `lifecycle` with `processes`, signals and the lifeline.

The main thread owns all state. One thread per process waits for its exit; other threads receive signals,
orders from the control socket (`control`) and messages of the gateway (`channels`). All of them put
events into one queue, which the main thread handles one at a time.

Invariants: however `run` ends, no child and nothing that a child started is left, every descriptor opened
here is closed, and the signal handlers are restored. If this process is killed outright, the write end of
the lifeline closes with it and the children end themselves (`protocol.lifeline`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import get_args

from deploy.supervisor.channels import GatewayChannel
from deploy.supervisor.child import Child, ServedModel, first_loaded
from deploy.supervisor.children import KILL_WAIT_S_MAX, STOP_TIMEOUT_S, other_name
from deploy.supervisor.control import Control
from deploy.supervisor.events import (
    AssignSpare,
    ChildMessage,
    Decision,
    Died,
    Event,
    Idle,
    Kill,
    ModelsWanted,
    NotStarted,
    Reloaded,
    Report,
    Serving,
    Start,
    StopAsked,
    Terminate,
    UseFallback,
    WorkersIdle,
)
from deploy.supervisor.fallbacks import Fallbacks
from deploy.supervisor.lifecycle import Lifecycle
from deploy.supervisor.memory import all_weight_bytes, local_folder, weights_of
from deploy.supervisor.processes import IdleWatch, Processes
from deploy.supervisor.pulls import Pulls
from deploy.supervisor.reloading import Reloading, ReloadOrder, Reloads
from deploy.supervisor.restarts import RestartLimits, RestartPolicy
from deploy.supervisor.spares import SPARE, Spares
from deploy.supervisor.stderr import QuietTerminal
from protocol import channel, lifeline
from protocol.common import listening
from protocol.common.model_folder import original_name
from protocol.supervisor_messages import DesiredModels, ModelState, ModelStates, ReadyWorker
from protocol.task_detection import detect_task
from protocol.tasks import Task

WAKE_S_MAX = 60.0
MEASURE_S = 2.0
"""Interval of memory measurements when models share a budget."""

END_CHARS_MAX = 1000
"""Limit of the exit message sent to the gateway."""

log = logging.getLogger(__name__)

_LISTENER_END_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class _NextReload:
    """Reload the next child of the open order."""


@dataclass(frozen=True, slots=True)
class _PullChanged:
    """A download has made progress."""


_QueueItem = Event | ReloadOrder | DesiredModels | _NextReload | _PullChanged


class Supervisor:
    """Supervisor that keeps `children` running until a stop, and then stops them in the order given.

    If there are several models, the gateway decides which of them run, within `memory_budget` bytes.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        limits: RestartLimits | None = None,
        reloading: Reloading | None = None,
        memory_budget: int | None = None,
        spare: bool = False,
        quiet: QuietTerminal | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: the socket on which gateways listen for clients; None: each opens its own."""
        self._events: queue.SimpleQueue[_QueueItem] = queue.SimpleQueue()
        self._reloading = reloading
        self._memory_budget = memory_budget
        self._control: Control | None = None
        self._gateway: GatewayChannel | None = None
        self._has_gateway = any(child.hears for child in children)
        self._processes = Processes(self._events.put, quiet)
        self._quiet = quiet
        self._listener = listener
        self._reloads = Reloads(children)
        self._ready: dict[int, ReadyWorker] = {}
        """Ready workers by process id, as the gateway reports them."""
        self._idle_watch = IdleWatch()
        self._pulls = Pulls(lambda: self._events.put(_PullChanged()))
        workers = [child for child in children if child.model is not None]
        self._models = _by_model(workers)
        self._on_demand = len(self._models) > 1
        limits = limits or RestartLimits()
        served = [child.model for child in workers if child.model is not None]
        first = [name for model in first_loaded(served) for name in self._models[model.name]]
        self._spare = _spare_for(workers) if spare else None
        takers = [each.name for each in workers if self._spare and each.can_become(self._spare)]
        self._lifecycle = Lifecycle(
            [child.name for child in children],
            RestartPolicy(limits),
            stop_timeout_s=stop_timeout_s,
            now=time.monotonic(),
            drain_timeout_s=reloading.drain_timeout_s if reloading else 0.0,
            ready_timeout_s=reloading.ready_timeout_s if reloading else 0.0,
            on_demand={each.name: RestartPolicy(limits) for each in workers} if self._on_demand else {},
            wanted=first,
            replicas=[names for names in self._models.values() if len(names) > 1],
            loading=[child.name for child in workers if child.settings is not None],
            spares=Spares(takers, RestartPolicy(limits)),
            fallbacks=Fallbacks(
                {each.name: each.fallback_after_s for each in workers if each.fallback},
                {each.name: each.plans for each in workers if each.fallback},
            ),
        )

    def run(self) -> int:
        """Run until everything has ended. Call it once, in the main thread: it handles SIGINT, SIGTERM and
        SIGHUP.

        Returns the exit status: 0 after a requested stop, 78 for wrong settings, 1 after too many deaths.
        """
        with stop_signals(self._events.put), self._control_open():
            reader, writer = os.pipe()  # both close-on-exec; children inherit the reader through `pass_fds`
            try:
                return self._loop(reader)
            finally:
                self._end_everything()
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
            log.warning("`roundhouse reload` will not work: %s", error)
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
            if self._lifecycle.is_stopping:
                self._stop_listening()
            if self._gateway is not None:
                self._gateway.tell(self._model_states())
            events = self._understood(self._next_event(), line)

    # --- in ---

    def _next_event(self) -> _QueueItem | None:
        wake_at, now = self._lifecycle.wake_at(), time.monotonic()
        wait_s = WAKE_S_MAX if wake_at is None else max(0.0, wake_at - now)
        wait_s = min(wait_s, MEASURE_S if self._on_demand else WAKE_S_MAX)
        if self._lifecycle.waits_for_idle:
            wait_s = min(wait_s, self._idle_watch.due_in_s(now))
        try:
            return self._events.get(timeout=wait_s)
        except queue.Empty:
            return WorkersIdle() if self._lifecycle.waits_for_idle and self._are_idle() else None

    def _are_idle(self) -> bool:
        names = [other for name in self._workers() for other in (name, other_name(name))]
        cpu_s = sum(map(self._processes.cpu_s, names))
        return self._idle_watch.is_idle(cpu_s, time.monotonic())

    def _understood(self, item: _QueueItem | None, line: int) -> Sequence[Event | None]:
        """Translate queue items into events, with child names in place of process ids. None: a timeout."""
        match item:
            case ReloadOrder():
                if refusal := self._begin_reload(item):
                    self._answer(False, refusal)
                    return [None]
                return [self._next_reload()]
            case _NextReload():
                return [self._next_reload()]
            case DesiredModels():
                if item.pulls is not None:
                    self._pulls.order(item.pulls, line)
                return self._ordered(item)
            case _PullChanged():
                return [None]  # the gateway is told after each event
            case StopAsked(by) if self._quiet is not None:
                self._quiet.stop(by)
                return [item]
            case Died(_, pid) | ChildMessage(_, pid):
                name = self._processes.names().get(pid)
                if name is None:
                    return [None]  # it was given up on after SIGKILL, and another process has its name
                return self._named(replace(item, name=name))
            case _:
                return [item]

    def _named(self, event: Died | ChildMessage) -> Sequence[Event]:
        # The gateway, if there is one, reports which workers serve: a loaded one is not connected to it yet.
        if isinstance(event, ChildMessage) and event.word == "loaded" and not self._has_gateway:
            return [event, Serving(event.name)]
        return [event]

    def _ordered(self, orders: DesiredModels) -> Sequence[Event | None]:
        names = self._processes.names()
        self._ready = {worker.pid: worker for worker in orders.workers}
        events: list[Event | None] = [
            Serving(names[pid], self._reloads.is_other(self._ready.get(pid)))
            for pid in orders.serving
            if pid in names
        ]
        events += [Idle(names[pid]) for pid in orders.idle if pid in names]
        if orders.wanted is not None:
            wanted = [name for model in orders.wanted for name in self._models.get(model, ())]
            events.append(ModelsWanted(frozenset(wanted)))
        return events or [None]

    # --- reload ---

    def _begin_reload(self, order: ReloadOrder) -> str | None:
        """Read the settings again and accept an order, or return why it is refused."""
        running = [name for name in self._workers() if self._lifecycle.stage(name) == "running"]
        try:
            self._reloads.refresh(self._reloading.read_again() if self._reloading else (), running)
        except (ValueError, OSError) as error:
            return f"nothing was reloaded, because the settings are wrong:\n{error}"
        return self._reloads.begin(order, running)

    def _next_reload(self) -> Event:
        child = self._reloads.next
        name = child if child in self._lifecycle.states() else other_name(child)
        runs = self._lifecycle.stage(child) == "running"
        new = self._reloads.successor(child)
        # Two sets of ranks would use the same ports, and two gateways the same journal.
        two_of_one = (self._reloads.programs[child].is_set and new.is_set) or new.hears
        weights = weights_of(new.model) if new.model is not None else None
        needed = max(self._taken_bytes(child), weights or 0)
        beside = not runs or (not two_of_one and self._fits(needed))
        worker = self._ready.get(self._pid(name) or 0)
        return self._reloads.ask(name, runs=runs, beside=beside, worker=worker)

    def _pid(self, name: str) -> int | None:
        return next((pid for pid, other in self._processes.names().items() if other == name), None)

    def _fits(self, needed_bytes: int) -> bool:
        taken = sum(map(self._taken_bytes, self._workers()))
        within = self._memory_budget is None or taken + needed_bytes <= self._memory_budget
        return within and (self._reloading is None or self._reloading.fits(needed_bytes))

    def _taken_bytes(self, child: str) -> int:
        """Return a running child's memory, at least its weights: separate GPU memory is not measured."""
        model = self._reloads.programs[child].model
        runs = self._lifecycle.stage(child) != "parked"
        weights = weights_of(model) if runs and model is not None else None
        return max(self._memory_bytes(child), weights or 0)

    def _reloaded(self, decision: Reloaded) -> None:
        child = self._reloads.next
        name = child if child in self._lifecycle.states() else other_name(child)
        pid = self._pid(name) if self._lifecycle.stage(child) == "running" else None
        result = self._reloads.checked(decision.done, decision.text, self._ready, pid)
        if result != decision:
            log.warning("reload: %s", result.text)
        answer = self._reloads.ended(result.done, result.text)
        if answer is None:
            self._events.put(_NextReload())
        else:
            self._answer(*answer)

    def _answer(self, done: bool, text: str) -> None:
        if self._control is not None:
            self._control.answer(done, text)

    # --- the gateway ---

    def _workers(self) -> list[str]:
        """Return the names of all workers."""
        return [name for names in self._models.values() for name in names]

    def _model_states(self) -> ModelStates:
        return ModelStates(
            models=[self._model_state(names) for names in self._models.values()],
            on_demand=self._on_demand,
            memory_budget=self._memory_budget,
            pulls=self._pulls.states(),
        )

    def _model_state(self, names: Sequence[str]) -> ModelState:
        borne = [other for name in names for other in (name, other_name(name))]
        stays = [name for name in borne if name in self._lifecycle.states()]
        model = self._reloads.programs[stays[-1]].model
        assert model is not None
        leaving, ends = self._lifecycle.leaving(), self._lifecycle.ends(*names)
        return ModelState(
            name=model.name,
            stage=self._lifecycle.stage(*names),
            aliases=list(model.aliases),
            resident=model.resident,
            weight_bytes=all_weight_bytes(model) if self._on_demand else None,
            memory_bytes=sum(map(self._memory_bytes, names)) if self._on_demand else 0,
            leaving=[self._processes.pid(name) for name in stays if name in leaving],
            restarts=ends.count,
            last_end=ends.last[:END_CHARS_MAX],
            last_end_reason=ends.reason,
            replicas=len(names),
            failure=ends.failure[:END_CHARS_MAX],
            loaded=self._lifecycle.is_loaded(*names),
            task=_task_of(model) if len(self._models) > 1 else None,
        )

    def _memory_bytes(self, child: str) -> int:
        return sum(self._processes.memory_bytes(name) for name in (child, other_name(child)))

    # --- processes ---

    def _carry_out(self, decision: Decision, line: int) -> None:
        match decision:
            case Start(name):
                self._start(name, self._program(name), line)
            case AssignSpare(name):
                if not self._processes.give(SPARE, name, self._program(name).settings):
                    self._events.put(NotStarted(name, "the spare cannot be reached"))
            case Reloaded():
                self._reloaded(decision)
            case UseFallback(child):
                self._reloads.fall(child)
            case Terminate(name):
                self._processes.terminate(name)
            case Kill(name):
                self._processes.kill(name)
            case Report(text, level):
                log.log(level, "%s", text)

    def _program(self, name: str) -> Child:
        if name == SPARE:
            assert self._spare is not None
            return self._spare
        return self._reloads.programs[name]

    def _start(self, name: str, child: Child, line: int) -> None:
        if name == SPARE:
            child = replace(child, env={**child.env, channel.SPARE: "1"})
        if not child.hears:
            self._processes.start(name, child, {lifeline.VARIABLE: line})
            return
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None
        try:
            gateway = self._gateway = GatewayChannel()
            if child.settings is not None:
                gateway.send_settings(child.settings)
            gateway.listen(self._events.put)
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            self._events.put(NotStarted(name, str(error)))
            return
        # Before the process exists: from its first request on, the gateway knows every model.
        gateway.tell(self._model_states())
        inherited = {lifeline.VARIABLE: line, channel.SUPERVISOR_FD: gateway.theirs.fileno()}
        if self._listener is not None:
            inherited[listening.LISTENER_FD] = self._listener.fileno()
        self._processes.start(name, child, inherited)
        gateway.theirs.close()

    def _stop_listening(self) -> None:
        """Close the socket for clients: there will be no other gateway that could answer them."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _end_everything(self) -> None:
        self._stop_listening()
        if self._gateway is not None:
            self._gateway.close()
        self._pulls.close()
        self._processes.end_everything(KILL_WAIT_S_MAX)


def _task_of(model: ServedModel) -> Task | None:
    """Return the task of a model, chosen or detected; None: its files are not on this machine."""
    chosen, folder = model.settings.get("task"), local_folder(model.model)
    detected = None if folder is None else detect_task(folder, original_name(model.model))
    return next((task for task in get_args(Task) if task == chosen), detected)


def _by_model(workers: Sequence[Child]) -> dict[str, list[str]]:
    """Return the workers' names by the name of the model that they serve."""
    found: dict[str, list[str]] = {}
    for child in workers:
        assert child.model is not None
        found.setdefault(child.model.name, []).append(child.name)
    return found


def _spare_for(workers: Sequence[Child]) -> Child | None:
    """Return a spare that can become the first worker that is no set of ranks, and those like it."""
    alone = (child for child in workers if child.settings is not None and not child.is_set)
    return next((replace(child, name=SPARE, settings=None) for child in alone), None)


@contextlib.contextmanager
def stop_signals(send: Callable[[StopAsked], None]) -> Iterator[None]:
    """Turn stop signals into events. Must be entered in the main thread.

    A Python handler runs only when the main thread is free. A signal that arrives just before that thread
    blocks, or that the kernel delivers to another thread, would stay unhandled until the wait is over. The
    wakeup descriptor is written at once, whichever thread gets the signal, so a thread reads that instead.
    """
    numbers = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup: outlive the terminal
        numbers.add(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader, send), name="signals", daemon=True)
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _noted_elsewhere) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(writer)
        listener.join(_LISTENER_END_S_MAX)
        os.close(reader)


def _listen(reader: int, send: Callable[[StopAsked], None]) -> None:
    while number := os.read(reader, 1):
        send(StopAsked(signal.Signals(number[0]).name))


def _noted_elsewhere(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: only a signal with a handler reaches the wakeup descriptor."""
