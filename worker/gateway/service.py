"""The I/O thread: connection to the gateway, heartbeats, requests to the pool and the model thread.

It is the process's main thread and never uses MLX, so it stays responsive whatever the model does. The
gateway may disconnect and be replaced; what becomes of its requests then, `session` decides.

On a stop signal the worker drains: it sends `Draining`, and exits when its last request ends, after the drain
timeout, or on a second signal. The gateway resends the remaining requests to another worker.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from protocol import breadcrumbs, sockets
from protocol.channel import SpawnChannel
from protocol.common.state_folder import server_name
from protocol.messages import (
    PROTOCOL_VERSION,
    ClearCache,
    Draining,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    Message,
    Rejected,
    UnloadAdapter,
    new_incarnation,
)
from protocol.settings.worker import WorkerSettings
from protocol.types import OrphanedRow, Resources
from worker.core.commands import AddAdapter, ClearPrefixes, RelieveMemory, RemoveAdapter
from worker.core.memory_relief import ReliefPolicy
from worker.gateway.dealer import DealerLink
from worker.gateway.model_thread import ModelThread
from worker.gateway.outbox import Outbox
from worker.gateway.requests import Requests
from worker.gateway.session import GatewaySession
from worker.interfaces import Loader, ModelError
from worker.process.device_errors import DeviceError
from worker.process.exit_codes import EXIT_BROKEN, status_of
from worker.process.memory_pressure import PressureSource, pressure_source
from worker.process.resources import ProcessMetrics
from worker.process.startup_timer import StartupTimer
from worker.process.watchdog import STALL_S_MAX, Progress, Watchdog

log = logging.getLogger(__name__)

BEAT_S = 0.25
STOP_WAIT_S = 2.0
PRESSURE_S = 1.0
_MESSAGES_AT_ONCE = 256


class Service:
    """One worker process. `run` returns its exit status."""

    def __init__(
        self,
        loader: Loader,
        settings: WorkerSettings,
        device_memory: Callable[[], Resources] = Resources,
        timer: StartupTimer | None = None,
        pressure: PressureSource | None = None,
    ) -> None:
        """Connect in the background. `timer`: timer of the start. `pressure`: default, this machine's. Raises
        `sockets.EndpointError`."""
        self._loader = loader
        self._settings = settings
        self._incarnation = new_incarnation()
        self._outbox = Outbox()
        self._model = ModelThread(loader, settings, self._incarnation, self._outbox, device_memory, timer)
        curve = sockets.Curve.load(settings.curve_keys, "worker") if settings.curve_keys else None
        endpoint = settings.endpoint or sockets.default_endpoint(server_name())
        line = DealerLink(endpoint, self._incarnation, curve)
        self._session = GatewaySession(line, self._introduce, self._requests_for)
        self._poller = sockets.poller(*line.readable, self._outbox.fileno())
        self._stops_asked = 0
        self._drain_until: float | None = None
        self._turned_away: ModelError | None = None
        self._watchdog = Watchdog(settings.stall_timeout_s or STALL_S_MAX, time.monotonic())
        self._meter = ProcessMetrics()
        self._pressure = pressure or pressure_source()
        self._relief, self._pressure_due = ReliefPolicy(), 0.0
        self._logbook = breadcrumbs.BreadcrumbWriter(os.environ)
        self._starting = SpawnChannel.find(os.environ)

    def _requests_for(self, send: Callable[[Message], None]) -> Requests:
        return Requests(self._incarnation, model=self._model, send=send, wake=self._outbox.wake)

    def run(self) -> int:
        """Run until a stop signal or the end of the model thread. Return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._model.start()
        try:
            status = self._serve()
        finally:
            self._close()
        return status

    def _on_signal(self, number: int, frame: object) -> None:
        self._stops_asked += 1
        self._outbox.wake()

    def _serve(self) -> int:
        next_beat = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat - time.monotonic())
            self._poller.poll(self._session.line.patience_ms(math.ceil(1000 * wait_s)))
            if self._stops_asked and self._is_drained(time.monotonic()):
                return self._stop()
            if not self._model.is_alive():
                return self._end_of_model()
            self._session.watch(time.monotonic())
            for message in self._session.receive():
                self._hear(message)
            self._tell_loaded()
            self._send_all()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()

    def _tell_loaded(self) -> None:
        """Tell the supervisor, once, that the model is loaded."""
        if self._starting is not None and self._model.is_loaded:
            self._starting.send("loaded")
            self._starting.close()
            self._starting = None

    def _is_drained(self, now: float) -> bool:
        """Return whether draining is complete; the first call begins it and sends `Draining`."""
        if self._drain_until is None:
            self._drain_until = now + self._settings.drain_timeout_s
            log.info("draining: %d requests in flight", len(self._session.requests))
            self._session.post(Draining(incarnation=self._incarnation))
        # Requests without a gateway are not waited for: no one may ever want their output.
        return not self._session.is_waited_for or now >= self._drain_until or self._stops_asked > 1

    def _stop(self) -> int:
        log.info("stopping: %d requests left for other workers", len(self._session.requests))
        self._session.post(Goodbye(incarnation=self._incarnation, reason="asked to stop"))
        self._send_all()
        self._model.stop()
        return 0

    def _end_of_model(self) -> int:
        self._send_all()
        if isinstance(failure := self._model.failure, DeviceError):
            # The gateway hands the requests over before this process has ended.
            self._session.post(Goodbye(incarnation=self._incarnation, reason=str(failure), died=True))
            self._send_all()
        return status_of(self._turned_away or failure)

    def _close(self) -> None:
        if self._model.pool is not None:
            self._model.pool.close()
        self._model.join(STOP_WAIT_S)
        self._session.line.close()
        self._outbox.close()

    # --- the gateway ---

    def _introduce(self, rows: Sequence[OrphanedRow]) -> list[Message]:
        """Return what a gateway is told first. `rows`: those that the worker still has."""
        versions = {name: metadata.version(name) for name in ("mlx-roundhouse", "mlx", "mlx-lm")}
        hello = Hello(
            incarnation=self._incarnation,
            version=PROTOCOL_VERSION,
            model=self._loader.name,
            pid=os.getpid(),
            versions=versions,
            host=os.uname().nodename,
            rows=list(rows),
        )
        # A draining worker must never appear as ready.
        if self._drain_until is not None:
            return [hello, Draining(incarnation=self._incarnation)]
        return [hello, self._model.state]

    def _hear(self, message: Message) -> None:
        match message:
            case Rejected():
                log.error("rejected by the gateway: %s", message.reason)
                self._turned_away = ModelError(message.reason)
                self._model.stop()
            case ClearCache():
                self._model.inbox.put(ClearPrefixes(message.id, message.namespace))
            case LoadAdapter():
                self._model.inbox.put(AddAdapter(message.name, Path(message.folder)))
            case UnloadAdapter():
                self._model.inbox.put(RemoveAdapter(message.name))

    # --- out ---

    def _send_all(self) -> None:
        if not self._session.line.is_backlogged:
            for message in self._outbox.take(_MESSAGES_AT_ONCE):
                self._session.post(message)
        self._session.send_all()

    def _relieve(self, now: float) -> None:
        """Look at the memory pressure, once in `PRESSURE_S`, and have the model thread act on it."""
        if now < self._pressure_due or not self._model.is_loaded:
            return
        self._pressure_due = now + PRESSURE_S
        before = self._relief.stage
        relief = self._relief.observe(self._pressure(), now)
        if relief is not None:
            self._model.inbox.put(RelieveMemory(relief))
        if relief is not None and relief != before:
            status = self._relief.status
            log.warning("memory pressure of the machine: %s; relief: %s", status.level, status.relief)

    def _beat(self) -> None:
        self._relieve(time.monotonic())
        counters = self._model.counters
        self._session.post(
            Heartbeat(
                incarnation=self._incarnation,
                running=counters.running,
                waiting=counters.waiting + self._session.requests.preparing,
                steps=counters.steps,
                cache_bytes=counters.cache_bytes,
                rows=counters.rows,
                prefix=counters.prefix,
                resources=self._meter.read(counters.device),
                images=counters.images,
                drafts=counters.drafts,
                starved=counters.starved,
                preparation=self._model.pool.status() if self._model.pool else None,
                pressure=self._relief.status,
            )
        )
        self._logbook.note(breadcrumbs.describe(counters.steps, counters.rows))
        self._send_all()
        self._check_progress(time.monotonic())

    def _check_progress(self, now: float) -> None:
        """Watchdog: if the worker has stalled, print all stacks to stderr and exit at once."""
        counters = self._model.counters
        seen = Progress(
            is_loaded=self._model.is_loaded,
            loaded=self._model.loaded,
            cpu_s=time.process_time() - time.thread_time(),
            running=counters.running,
            waiting=counters.waiting,
            commands=self._model.inbox.qsize(),
            steps=counters.steps,
            unsent=self._outbox.depth(),
        )
        why = self._watchdog.verdict(seen, now)
        if why is None and self._model.pool is not None and self._model.pool.is_stuck(now):
            why = "requests cannot be prepared: a preparer thread is stuck"
        if why is not None:
            log.critical("%s", why)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_BROKEN)
