"""The I/O thread: the line to the gateway, heartbeats, requests to the pool and on to the model thread.

It is the process's main thread and never touches MLX, so it stays responsive whatever the model does. The
gateway may come, go and be replaced: while there is none, rows are dropped, since nobody would read them.

Told to stop, it drains: it says so, and ends when the last of its requests has, when their time is up, or
when it is told again. Those that are left are the gateway's to hand to another worker.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from importlib import metadata

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import logbook, sockets, wire
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    ClearCache,
    Draining,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Loading,
    Message,
    Ready,
    Rejected,
    Welcome,
    new_incarnation,
)
from worker.commands import Clear, Command, Drop, Stop, Submit
from worker.company import Company
from worker.config import WorkerSettings
from worker.contract import Loader, Model, ModelError
from worker.counters import Counters
from worker.exits import EXIT_BROKEN, status_of
from worker.introduction import policy_of, ready
from worker.loop import Loop
from worker.outbox import Outbox
from worker.pool import Outcome, PreparerPool
from worker.reuse import Limits, open_store
from worker.scheduler import Scheduler

log = logging.getLogger(__name__)

BEAT_S = 0.25
STOP_WAIT_S = 2.0
_SENDS_AT_ONCE = 256
_UNSENT_RETRY_MS = 5


class Service:
    """One worker process. `run` returns its exit status."""

    def __init__(self, loader: Loader, settings: WorkerSettings) -> None:
        """Connects in the background. Raises `sockets.EndpointError`."""
        self._loader = loader
        self._settings = settings
        self._incarnation = new_incarnation()
        endpoint = settings.endpoint or sockets.default_endpoint(8000)
        curve = sockets.Curve.load(settings.curve_keys, "worker") if settings.curve_keys else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, endpoint, self._incarnation, curve)
        self._monitor = self._socket.get_monitor_socket()
        self._outbox = Outbox()
        self._unsent: deque[Message] = deque()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._counters = Counters()
        self._prepared: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self._preparing: set[str] = set()
        self._open: set[str] = set()
        """Requests that have been taken, and whose end has not been said."""
        self._dropped = 0
        """Messages that were none."""
        self._pool: PreparerPool | None = None
        self._ready: Ready | None = None
        self._loaded = 0, 0
        self._connected = False
        self._gateway: str | None = None
        self._welcome_due = False
        self._stops_asked = 0
        self._drain_until: float | None = None
        self._failure: BaseException | None = None
        self._last_step = 0, time.monotonic()
        self._logbook = logbook.Logbook(os.environ)
        self._model_thread = threading.Thread(target=self._run_model, name="model", daemon=True)

    # --- the model thread ---

    def _run_model(self) -> None:
        try:
            model = self._loader.load(self._report_progress)
            loop = self._make_loop(model)
            try:
                loop.run()
            finally:
                if loop.store:
                    loop.store.close()
        except BaseException as error:  # the thread's boundary: the I/O thread decides what it means
            self._failure = error
        self._outbox.wake()

    def _report_progress(self, done: int, total: int) -> None:
        self._loaded = done, total
        self._outbox.put(Loading(incarnation=self._incarnation, done=done, total=total))

    def _make_loop(self, model: Model) -> Loop:
        self._pool = PreparerPool(model.open_preparer)
        self._pool.warm()
        settings = self._settings
        limits = Limits(settings.prefix_cache_ram, settings.prefix_cache_disk, settings.prefix_folder)
        store = open_store(model, limits, self._inbox.put)
        policy = policy_of(settings, model)
        self._ready = ready(self._incarnation, model.facts, policy)
        self._outbox.put(self._ready)
        return Loop(
            model=model,
            scheduler=Scheduler(policy, store.index if store else None),
            store=store,
            incarnation=self._incarnation,
            inbox=self._inbox,
            publish=self._outbox.put,
            backlog=self._outbox.depth,
            company=Company(self._settings.admission_window_s),
            counters=self._counters,
        )

    # --- the I/O thread ---

    def run(self) -> int:
        """Until told to stop, or until the model thread ends. The exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._model_thread.start()
        try:
            status = self._serve()
        finally:
            self._close()
        return status

    def _on_signal(self, number: int, frame: object) -> None:
        self._stops_asked += 1
        self._outbox.wake()

    def _serve(self) -> int:
        poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._outbox.fileno()):
            poller.register(readable, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat - time.monotonic())
            poller.poll(_UNSENT_RETRY_MS if self._unsent else math.ceil(1000 * wait_s))
            if self._stops_asked and self._is_drained(time.monotonic()):
                return self._stop()
            if not self._model_thread.is_alive():
                return self._end_of_model()
            self._watch_connection()
            self._receive_all()
            self._take_prepared()
            self._send_all()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()

    def _is_drained(self, now: float) -> bool:
        """Whether it may end, having been told to; the first time, that is announced."""
        if self._drain_until is None:
            self._drain_until = now + self._settings.drain_timeout_s
            log.info("told to stop: %d requests to end", len(self._open))
            self._unsent.append(Draining(incarnation=self._incarnation))
        return not self._open or now >= self._drain_until or self._stops_asked > 1

    def _stop(self) -> int:
        log.info("stopping, %d requests left to others", len(self._open))
        self._unsent.append(Goodbye(incarnation=self._incarnation, reason="asked to stop"))
        self._send_all()
        self._inbox.put(Stop())
        return 0

    def _end_of_model(self) -> int:
        self._send_all()
        return status_of(self._failure)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._model_thread.join(STOP_WAIT_S)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        self._outbox.close()

    # --- connection ---

    def _watch_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._introduce()
            elif self._connected:
                log.warning("the gateway is gone; waiting for it to come back")
                self._connected, self._gateway = False, None
                self._abandon_rows()

    def _abandon_rows(self) -> None:
        self._preparing.clear()
        self._open.clear()
        self._unsent.clear()
        self._inbox.put(Drop(None))

    def _introduce(self) -> None:
        self._welcome_due = True
        versions = {name: metadata.version(name) for name in ("mlx-roundhouse", "mlx", "mlx-lm")}
        hello = Hello(
            incarnation=self._incarnation,
            version=PROTOCOL_VERSION,
            model=self._loader.name,
            pid=os.getpid(),
            versions=versions,
        )
        state: Message
        if self._ready is not None:
            state = self._ready
        else:
            done, total = self._loaded
            state = Loading(incarnation=self._incarnation, done=done, total=total)
        # One that drains is not ready, not even for a moment.
        self._unsent.extend((hello, state) if self._drain_until is None else (hello,))

    # --- in ---

    def _receive_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, media = wire.decode_to_worker(frames)
            except wire.WireError as error:
                self._dropped += 1
                log.warning("dropped a message, the %dth so far: %s", self._dropped, error)
                continue
            self._hear(message, media)

    def _hear(self, message: Message, media: list[bytes]) -> None:
        match message:
            case Welcome():
                self._meet(message)
            case Rejected():
                log.error("turned away by the gateway: %s", message.reason)
                self._failure = ModelError(message.reason)
                self._inbox.put(Stop())
            case Generate() if message.id in self._open:
                log.warning("%s: is here already", message.id)  # its one flight hears from the first
            case Generate():
                self._take_request(message, media)
            case Cancel():
                self._preparing.discard(message.id)
                self._open.discard(message.id)
                self._inbox.put(Drop(message.id))
            case ClearCache():
                self._inbox.put(Clear(message.id))

    def _meet(self, message: Welcome) -> None:
        if self._gateway not in (None, message.incarnation):
            self._abandon_rows()
        self._gateway = message.incarnation
        if self._welcome_due:
            self._welcome_due = False
        else:
            self._introduce()

    def _take_request(self, request: Generate, media: list[bytes]) -> None:
        self._open.add(request.id)
        if self._pool is None:
            self._refuse(request.id, RequestError(Code.MODEL_LOADING))
            return
        self._preparing.add(request.id)
        self._pool.prepare(request, media, self._on_prepared)

    def _on_prepared(self, id: str, outcome: Outcome) -> None:
        self._prepared.put((id, outcome))
        self._outbox.wake()

    def _take_prepared(self) -> None:
        while not self._prepared.empty():
            id, outcome = self._prepared.get()
            if id not in self._preparing:
                continue  # cancelled meanwhile
            self._preparing.discard(id)
            if isinstance(outcome, RequestError):
                self._refuse(id, outcome)
                continue
            tokens = len(outcome.tokens)
            self._unsent.append(Accepted(incarnation=self._incarnation, id=id, prompt_tokens=tokens))
            self._inbox.put(Submit(outcome))

    def _refuse(self, id: str, error: RequestError) -> None:
        self._unsent.append(
            Failed(
                incarnation=self._incarnation,
                id=id,
                code=error.code,
                message=error.message,
                param=error.param,
            )
        )

    # --- out ---

    def _send_all(self) -> None:
        if not self._connected:
            # What is said to nobody is not kept: a gateway that comes later hears the state anew.
            self._outbox.take(_SENDS_AT_ONCE)
            self._unsent.clear()
            return
        if not self._unsent:
            self._unsent.extend(self._outbox.take(_SENDS_AT_ONCE))
        while self._unsent:
            try:
                self._socket.send_multipart(wire.encode(self._unsent[0]), zmq.NOBLOCK)
            except zmq.Again:
                return
            sent = self._unsent.popleft()
            if isinstance(sent, Finished | Failed):
                self._open.discard(sent.id)

    def _beat(self) -> None:
        counters = self._counters
        self._unsent.append(
            Heartbeat(
                incarnation=self._incarnation,
                running=counters.running,
                waiting=counters.waiting + len(self._preparing),
                steps=counters.steps,
                cache_bytes=counters.cache_bytes,
                rows=counters.rows,
                prefix=counters.prefix,
            )
        )
        self._logbook.note(logbook.describe(counters.steps, counters.rows))
        self._send_all()
        self._check_progress(time.monotonic())

    def _check_progress(self, now: float) -> None:
        """The verdict *stalled*, by the worker itself: stacks to stderr, then a quick end."""
        steps, since = self._last_step
        if self._counters.steps != steps or self._counters.running == 0:
            self._last_step = self._counters.steps, now
        elif now - since > self._settings.stall_timeout_s and self._outbox.depth() == 0:
            log.critical("no step for %.0f s with %d rows running", now - since, self._counters.running)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_BROKEN)
