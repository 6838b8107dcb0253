"""What `serve` prints to a terminal, in place of log lines: at most six lines until it is stopped. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from deploy.serving.settings import GATEWAY, ServeSettings
from deploy.serving.startup_progress import decimal_size
from deploy.supervisor.child import ServedModel
from protocol import server_lock


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
