"""The I/O thread: connection to the gateway, heartbeats, requests to the pool and the model thread.

It is the process's main thread and never uses MLX, so it stays responsive whatever the model does. The
gateway may disconnect and be replaced; on a disconnect all rows are dropped, as nothing reads their output.

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
from collections.abc import Callable
from importlib import metadata

from protocol import breadcrumbs, sockets
from protocol.channel import SpawnChannel
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ClearCache,
    Draining,
    Embed,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Rank,
    Rejected,
    Welcome,
    new_incarnation,
)
from protocol.types import Resources
from protocol.worker_settings import WorkerSettings
from worker.contract.device_errors import DeviceError
from worker.contract.engine import Loader, ModelError
from worker.schedule.commands import ClearPrefixes
from worker.startup_timer import StartupTimer
from worker.transport.dealer import DealerLink
from worker.transport.exit_codes import EXIT_BROKEN, status_of
from worker.transport.modelthread import ModelThread
from worker.transport.outbox import Outbox
from worker.transport.requests import Requests
from worker.transport.resources import ProcessMetrics
from worker.transport.watchdog import STALL_S_MAX, Progress, Watchdog

log = logging.getLogger(__name__)

BEAT_S = 0.25
STOP_WAIT_S = 2.0
LOST_S = 1.0
"""Time without a connection until that is logged: at a stop, the gateway ends just before its workers."""


class Service:
    """One worker process. `run` returns its exit status."""

    def __init__(
        self,
        loader: Loader,
        settings: WorkerSettings,
        device_memory: Callable[[], Resources] = Resources,
        timer: StartupTimer | None = None,
    ) -> None:
        """Connect in the background. `timer`: timer of the start. Raises `sockets.EndpointError`."""
        self._loader = loader
        self._settings = settings
        self._incarnation = new_incarnation()
        endpoint = settings.endpoint or sockets.default_endpoint(8000)
        curve = sockets.Curve.load(settings.curve_keys, "worker") if settings.curve_keys else None
        self._line = DealerLink(endpoint, self._incarnation, curve)
        self._outbox = Outbox()
        self._model = ModelThread(loader, settings, self._incarnation, self._outbox, device_memory, timer)
        self._requests = Requests(
            self._incarnation, model=self._model, send=self._line.send, wake=self._outbox.wake
        )
        self._gateway: str | None = None
        self._lost_at: float | None = None
        self._welcome_due = False
        self._stops_asked = 0
        self._drain_until: float | None = None
        self._turned_away: ModelError | None = None
        self._watchdog = Watchdog(settings.stall_timeout_s or STALL_S_MAX, time.monotonic())
        self._meter = ProcessMetrics()
        self._logbook = breadcrumbs.BreadcrumbWriter(os.environ)
        self._starting = SpawnChannel.find(os.environ)

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
        poller = self._line.poller(self._outbox.fileno())
        next_beat = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat - time.monotonic())
            poller.poll(self._line.patience_ms(math.ceil(1000 * wait_s)))
            if self._stops_asked and self._is_drained(time.monotonic()):
                return self._stop()
            if not self._model.is_alive():
                return self._end_of_model()
            self._watch_line()
            for message, media in self._line.receive():
                self._hear(message, media)
            self._requests.pass_on()
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
            log.info("draining: %d requests in flight", len(self._requests))
            self._line.send(Draining(incarnation=self._incarnation))
        return not self._requests or now >= self._drain_until or self._stops_asked > 1

    def _stop(self) -> int:
        log.info("stopping: %d requests left for other workers", len(self._requests))
        self._line.send(Goodbye(incarnation=self._incarnation, reason="asked to stop"))
        self._send_all()
        self._model.stop()
        return 0

    def _end_of_model(self) -> int:
        self._send_all()
        if isinstance(failure := self._model.failure, DeviceError):
            # The gateway hands the requests over before this process has ended.
            self._line.send(Goodbye(incarnation=self._incarnation, reason=str(failure), died=True))
            self._send_all()
        return status_of(self._turned_away or failure)

    def _close(self) -> None:
        if self._model.pool is not None:
            self._model.pool.close()
        self._model.join(STOP_WAIT_S)
        self._line.close()
        self._outbox.close()

    # --- the gateway ---

    def _watch_line(self) -> None:
        if self._lost_at is not None and time.monotonic() >= self._lost_at + LOST_S:
            self._lost_at = None
            log.warning("connection to the gateway lost; reconnecting")
        for there in self._line.changes():
            if there:
                self._lost_at = None
                self._introduce()
            else:
                self._gateway, self._lost_at = None, time.monotonic()
                self._abandon_rows()

    def _abandon_rows(self) -> None:
        self._line.forget()
        self._requests.abandon()

    def _introduce(self) -> None:
        self._welcome_due = True
        versions = {name: metadata.version(name) for name in ("mlx-roundhouse", "mlx", "mlx-lm")}
        hello = Hello(
            incarnation=self._incarnation,
            version=PROTOCOL_VERSION,
            model=self._loader.name,
            pid=os.getpid(),
            versions=versions,
            host=os.uname().nodename,
        )
        self._line.send(hello)
        if self._drain_until is None:  # a draining worker must never appear as ready
            self._line.send(self._model.state)

    # --- in ---

    def _hear(self, message: Message, media: list[bytes]) -> None:
        match message:
            case Welcome():
                self._meet(message)
            case Rejected():
                log.error("rejected by the gateway: %s", message.reason)
                self._turned_away = ModelError(message.reason)
                self._model.stop()
            case Generate() | Embed() | Rank():
                self._requests.take(message, media)
            case Cancel():
                self._requests.cancel(message.id)
            case ClearCache():
                self._model.inbox.put(ClearPrefixes(message.id, message.namespace))

    def _meet(self, message: Welcome) -> None:
        if self._gateway not in (None, message.incarnation):
            self._abandon_rows()
        self._gateway = message.incarnation
        if self._welcome_due:
            self._welcome_due = False
        else:
            self._introduce()

    # --- out ---

    def _send_all(self) -> None:
        self._requests.sent(self._line.send_all(self._outbox.take))

    def _beat(self) -> None:
        counters = self._model.counters
        self._line.send(
            Heartbeat(
                incarnation=self._incarnation,
                running=counters.running,
                waiting=counters.waiting + self._requests.preparing,
                steps=counters.steps,
                cache_bytes=counters.cache_bytes,
                rows=counters.rows,
                prefix=counters.prefix,
                resources=self._meter.read(counters.device),
                images=counters.images,
                drafts=counters.drafts,
                starved=counters.starved,
                preparation=self._model.pool.status() if self._model.pool else None,
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
