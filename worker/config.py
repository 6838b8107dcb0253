"""The worker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from protocol import logs
from protocol.settings import public_name

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class WorkerSettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Everything about one worker process that can be set."""

    model: Annotated[
        str | None, Meta(description="folder or Hugging Face id; none: the embedded pocket model")
    ] = None
    endpoint: Annotated[
        str, Meta(description="where the gateway is; empty: the socket of a gateway on port 8000")
    ] = ""
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
    ] = None
    max_running: Annotated[
        int, Meta(ge=1, le=4096, description="requests that decode together; more wait their turn")
    ] = 16
    prefill_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="prompt tokens run between two decode steps")
    ] = 512
    memory_limit_bytes: Annotated[
        int | None, Meta(ge=0, description="refuse a model larger than this; none: what the machine has")
    ] = None
    stall_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds without a step, while rows run, after which the worker ends itself"),
    ] = 120.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"
