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
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata

from protocol import logbook, sockets
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
from protocol.parts import Resources
from protocol.startline import Starting
from protocol.workersettings import WorkerSettings
from worker.contract import Loader, ModelError
from worker.laps import Laps
from worker.line.dealer import Line
from worker.line.exits import EXIT_BROKEN, status_of
from worker.line.modelthread import ModelThread
from worker.line.outbox import Outbox
from worker.line.requests import Requests
from worker.line.resources import Meter
from worker.schedule.commands import Clear

log = logging.getLogger(__name__)

BEAT_S = 0.25
STOP_WAIT_S = 2.0
STALL_S_MAX = 120.0
"""Where nothing else is said."""


class Service:
    """One worker process. `run` returns its exit status."""

    def __init__(
        self,
        loader: Loader,
        settings: WorkerSettings,
        device_memory: Callable[[], Resources] = Resources,
        laps: Laps | None = None,
    ) -> None:
        """`laps`: of the process's start. Connects in the background. Raises `sockets.EndpointError`."""
        self._loader = loader
        self._settings = settings
        self._incarnation = new_incarnation()
        endpoint = settings.endpoint or sockets.default_endpoint(8000)
        curve = sockets.Curve.load(settings.curve_keys, "worker") if settings.curve_keys else None
        self._line = Line(endpoint, self._incarnation, curve)
        self._outbox = Outbox()
        self._model = ModelThread(loader, settings, self._incarnation, self._outbox, device_memory, laps)
        self._requests = Requests(
            self._incarnation, model=self._model, say=self._line.say, wake=self._outbox.wake
        )
        self._gateway: str | None = None
        self._welcome_due = False
        self._stops_asked = 0
        self._drain_until: float | None = None
        self._turned_away: ModelError | None = None
        self._last_step = 0, time.monotonic()
        self._meter = Meter()
        self._logbook = logbook.Logbook(os.environ)
        self._starting = Starting.find(os.environ)

    def run(self) -> int:
        """Until told to stop, or until the model thread ends. The exit status."""
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
        """The supervisor, once."""
        if self._starting is not None and self._model.is_loaded:
            self._starting.say("loaded")
            self._starting.close()
            self._starting = None

    def _is_drained(self, now: float) -> bool:
        """Whether it may end, having been told to; the first time, that is announced."""
        if self._drain_until is None:
            self._drain_until = now + self._settings.drain_timeout_s
            log.info("told to stop: %d requests to end", len(self._requests))
            self._line.say(Draining(incarnation=self._incarnation))
        return not self._requests or now >= self._drain_until or self._stops_asked > 1

    def _stop(self) -> int:
        log.info("stopping, %d requests left to others", len(self._requests))
        self._line.say(Goodbye(incarnation=self._incarnation, reason="asked to stop"))
        self._send_all()
        self._model.stop()
        return 0

    def _end_of_model(self) -> int:
        self._send_all()
        return status_of(self._turned_away or self._model.failure)

    def _close(self) -> None:
        if self._model.pool is not None:
            self._model.pool.close()
        self._model.join(STOP_WAIT_S)
        self._line.close()
        self._outbox.close()

    # --- the gateway ---

    def _watch_line(self) -> None:
        for there in self._line.changes():
            if there:
                self._introduce()
            else:
                self._gateway = None
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
        self._line.say(hello)
        if self._drain_until is None:  # one that drains is not ready, not even for a moment
            self._line.say(self._model.state)

    # --- in ---

    def _hear(self, message: Message, media: list[bytes]) -> None:
        match message:
            case Welcome():
                self._meet(message)
            case Rejected():
                log.error("turned away by the gateway: %s", message.reason)
                self._turned_away = ModelError(message.reason)
                self._model.stop()
            case Generate() | Embed() | Rank():
                self._requests.take(message, media)
            case Cancel():
                self._requests.cancel(message.id)
            case ClearCache():
                self._model.inbox.put(Clear(message.id))

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
        self._requests.sent(self._line.send(self._outbox.take))

    def _beat(self) -> None:
        counters = self._model.counters
        self._line.say(
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
            )
        )
        self._logbook.note(logbook.describe(counters.steps, counters.rows))
        self._send_all()
        self._check_progress(time.monotonic())

    def _check_progress(self, now: float) -> None:
        """The verdict *stalled*, by the worker itself: stacks to stderr, then a quick end."""
        steps, since = self._last_step
        counters = self._model.counters
        if counters.steps != steps or counters.running == 0:
            self._last_step = counters.steps, now
        elif now - since > (self._settings.stall_timeout_s or STALL_S_MAX) and self._outbox.depth() == 0:
            log.critical("no step for %.0f s with %d rows running", now - since, counters.running)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_BROKEN)
