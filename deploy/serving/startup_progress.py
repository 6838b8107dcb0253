"""Start-up progress of `serve` in the terminal: loading progress, then an example request.

A thread polls the gateway until a model is ready, reports that once, and ends. It only observes: its failure
does not affect serving.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from deploy.serving.settings import GATEWAY, ServeSettings
from deploy.supervisor.child import ServedModel, first_loaded
from deploy.supervisor.memory import weight_bytes
from protocol import server_lock

log = logging.getLogger(__name__)

LOOK_S = 0.5
TELL_S = 5.0
"""Interval of progress lines when stderr is no terminal."""
ANSWER_S_MAX = 2.0
BAR_WIDTH = 10
"""The bar and its percentage are shorter than any log line, which begins with 18 columns of time and
process, so that a log line covers it."""

_ERASE = "\r\x1b[K"

Write = Callable[[str], object]


def announcement(url: str, models: Sequence[ServedModel]) -> str:
    """Return the first log line of `serve`: its URL and the models that it loads."""
    first = first_loaded(models)
    later = [model.name for model in models if model not in first]
    return f"opening {url}/v1, {first_loads(models)}" + (f"; on demand: {', '.join(later)}" if later else "")


def first_loads(models: Sequence[ServedModel]) -> str:
    """Return which models are loaded at the start, with the sizes of their weights."""
    return f"loading {', '.join(map(_described, first_loaded(models)))}"


def _described(model: ServedModel) -> str:
    times = f"{model.replicas} workers of " if model.replicas > 1 else ""
    return f"{times}{model.name} ({_size(model)})"


def _size(model: ServedModel) -> str:
    size = weight_bytes(model.model)
    return "not downloaded yet" if size is None else decimal_size(size)


def decimal_size(size: int) -> str:
    """Return bytes as MB or GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class StartupProgress:
    """Progress reporter, active while its context is open."""

    def __init__(
        self,
        url: str,
        keys: Sequence[str] = (),
        draw: Write | None = None,
        greet: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        """`draw`: writes to a terminal; None: progress is logged instead. `greet`: makes the text that is
        drawn when a model is loaded, from the document of `/v1/status`; None: a line is logged."""
        self._url = url
        self._keys = keys
        self._draw = draw
        self._greet = greet
        self._drawn = False
        self._reported_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="greeting", daemon=True)

    def __enter__(self) -> StartupProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(ANSWER_S_MAX)

    def _look(self) -> None:
        waited_s = 0.0
        while not self._over.wait(LOOK_S):
            waited_s += LOOK_S
            status = self._status()
            if loaded := [m["model"] for m in status.get("models", ()) if m["state"] == "loaded"]:
                self._wipe()
                if self._draw is not None and self._greet is not None:
                    self._draw(self._greet(status))
                else:
                    log.info("%s", words(self._url, loaded, needs_key=bool(self._keys)))
                return
            for model, done, total in loading(status):
                self._tell(model, done / total, waited_s)

    def _tell(self, model: str, share: float, waited_s: float) -> None:
        # Once the weights are read, the worker tests what the model can batch, and warms it up.
        stage = f"{share:.0%}" if share < 1 else "warm-up"
        if self._draw is not None:
            self._drawn = True
            # The cursor returns to the first column, where the next log line begins.
            self._draw(f"{_ERASE}{bar(share)} {stage}\r")
        elif waited_s - self._reported_at >= TELL_S:
            self._reported_at = waited_s
            log.info("loading %s: %s", model, stage)

    def _wipe(self) -> None:
        if self._draw is not None and self._drawn:
            self._draw(_ERASE)

    def _status(self) -> dict[str, Any]:
        """Return the document of `/v1/status`; empty if it is not available yet."""
        request = urllib.request.Request(f"{self._url}/v1/status?history=false")
        for key in self._keys[:1]:
            request.add_header("authorization", f"Bearer {key}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_S_MAX) as answer:
                found = json.load(answer)
        except (OSError, ValueError, HTTPException):
            return {}
        return found if isinstance(found, dict) else {}


def terminal() -> Write | None:
    """Return a writer to stderr if it is a terminal."""
    return _write if sys.stderr.isatty() else None


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def loading(status: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return the models that are being loaded, each with loaded and total bytes."""
    found = [(worker["model"], worker.get("loading")) for worker in status.get("workers", ())]
    return [(model, each["done"], each["total"]) for model, each in found if each and each["total"]]


def bar(share: float) -> str:
    """Return a progress bar of `BAR_WIDTH` characters."""
    full = round(max(0.0, min(1.0, share)) * BAR_WIDTH)
    return "█" * full + "░" * (BAR_WIDTH - full)


def words(url: str, models: Sequence[str], *, needs_key: bool) -> str:
    """Return the line with models, URL and an example command for another terminal."""
    key = ' -H "authorization: Bearer YOUR-KEY"' if needs_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    path, kind = f"{url}/v1/chat/completions", "-H 'content-type: application/json'"
    return f"serving {', '.join(models)} at {url}/v1; try: curl {path} {kind}{key} -d '{body}'"


# --- What `serve` prints to a terminal, in place of log lines: at most six lines until it is stopped ---


def is_quiet(given: ServeSettings, *, to_terminal: bool) -> bool:
    """Return whether routine log lines are hidden: at a terminal, unless they were asked for."""
    asked_for = given.verbose or given.log_format == "json" or given.log_level in ("debug", "info")
    return to_terminal and not asked_for


def greeting(status: Mapping[str, Any], url: str, served: Sequence[ServedModel], *, needs_key: bool) -> str:
    """Return five lines for a terminal when a model is loaded. `status`: the document of `/v1/status`."""
    loaded = [each["model"] for each in status["models"] if each["state"] == "loaded"]
    later = [model.name for model in served if model.name not in loaded]
    on_demand = f"; on demand: {', '.join(later)}" if later else ""
    lines = (
        f"{', '.join(loaded)} is ready{_memory(status)}{on_demand}",
        f"  API    {url}/v1{' (API key required)' if needs_key else ''}",
        f"  page   {url}/",
        f"  chat   roundhouse chat{_address_flags(url)}",
        "Ctrl-C stops. Log lines: -v",
    )
    return "".join(f"{line}\n" for line in lines)


def _address_flags(url: str) -> str:
    """Return the flags by which `chat` finds the server; none for the default address."""
    parts = urlsplit(url)
    found = server_lock.flags(parts.hostname or GATEWAY.host, parts.port or GATEWAY.port)
    return "" if found == f"--port {GATEWAY.port}" else f" {found}"


def _memory(status: Mapping[str, Any]) -> str:
    """Return the memory of the weights of all workers, and the limit of their KV caches."""
    workers = [each for each in status.get("workers", ()) if each.get("memory")]
    taken = sum(each["memory"].get("device_bytes", 0) for each in workers)
    caches = sum(each.get("cache_bytes_max", 0) for each in workers)
    if not taken:
        return ""
    more = f", up to {decimal_size(caches)} for KV caches" if caches else ""
    return f": {decimal_size(taken)} of memory{more}"
