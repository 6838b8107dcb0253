"""Status documents as the server writes them; unspecified fields are those of an idle server."""

from __future__ import annotations

from typing import Any

NOW = 1_700_000_000.0
PHASES = [["queued", 0.0], ["preparing", 0.01], ["waiting", 0.02], ["prefill", 0.05], ["decode", 0.25]]


def model(name: str = "org/model", **told: Any) -> dict[str, Any]:
    return {
        "model": name, "aliases": [], "state": "loaded", "on_demand": False, "pinned": False,
        "weight_bytes": None, "waiting": 0, "restarts": None, "last_end": "", "last_end_reason": "",
        "answered_tokens": 0, "adapters": [],
    } | told  # fmt: skip


def worker(name: str = "org/model", **told: Any) -> dict[str, Any]:
    return {
        "model": name, "state": "ready", "incarnation": "w1", "pid": 7, "connected_s": 60.0,
        "uptime_s": 61.0, "loading": None, "context_length": 8192, "running_max": 4, "memory": None,
        "running": 0, "waiting": 0, "cache_bytes": 0, "cache_bytes_max": None, "prefix": None,
        "images": None,
    } | told  # fmt: skip


def request(id: str = "chatcmpl-1", **told: Any) -> dict[str, Any]:
    return {
        "id": id, "time": NOW - 2.0, "key": "", "model": "org/model", "phase": "decode", "seconds": 2.0,
        "prompt_tokens": 100, "prefilled": 100, "answered": 12, "time_to_first_token_s": 0.25,
        "tokens_per_s": 41.3, "reuse": None, "preemptions": 0, "resumes": 0, "phases": PHASES,
    } | told  # fmt: skip


def event(what: str, at: float, name: str = "org/model", **told: Any) -> dict[str, Any]:
    return {"time": at, "model": name, "incarnation": "w1", "pid": 7, "what": what} | told


def end(code: str = "stop", **told: Any) -> dict[str, Any]:
    return {
        "time": NOW, "id": "chatcmpl-1", "model": "org/model", "task": "generate", "code": code,
        "prompt_tokens": 100, "cached_tokens": 0, "answered": 12, "time_to_first_token_s": 0.25,
        "seconds": 2.0, "resumes": 0, "key": "", "phases": PHASES,
    } | told  # fmt: skip


def refusal(status: int, code: str, **told: Any) -> dict[str, Any]:
    asked = {"time": NOW, "request_id": "req_1", "method": "POST", "path": "/v1/chat/completions"}
    return asked | {"status": status, "code": code} | told


def document(**told: Any) -> dict[str, Any]:
    """Return a status document. `ends`, `failures`, `refusals` and `events` list the latest first."""
    return {
        "time": NOW,
        "gateway": {
            "version": "1.2.3", "uptime_s": 3700.0, "stopping": False, "captured": told.get("captured"),
            "memory_budget": told.get("memory_budget"),
        },
        "models": told.get("models", [model()]),
        "workers": told.get("workers", [worker()]),
        "requests": told.get("requests", []),
        "recent": {
            "ends": told.get("ends", []), "failures": told.get("failures", []),
            "refusals": told.get("refusals", []), "workers": told.get("events", []),
        },
    }  # fmt: skip
