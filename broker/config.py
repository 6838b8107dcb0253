"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from protocol import logs
from protocol.settings import public_name

Port = Annotated[int, Meta(ge=1, le=65535, description="where clients connect")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class GatewaySettings(Struct, frozen=True, kw_only=True, rename=public_name):
    """Everything about one gateway process that can be set."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Port = 8000
    endpoint: Annotated[
        str,
        Meta(
            description="where workers connect; empty: a socket named after the port in the runtime directory"
        ),
    ] = ""
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
    ] = None
    max_waiting: Annotated[
        int, Meta(ge=0, le=65536, description="requests that may wait for a worker; beyond them 503 at once")
    ] = 64
    body_bytes_max: Annotated[int, Meta(ge=1024, description="largest request body, in bytes")] = 32 * 2**20
    media_bytes_max: Annotated[int, Meta(ge=1024, description="largest image, in bytes")] = 16 * 2**20
    keepalive_s: Annotated[
        Seconds, Meta(description="seconds of silence after which a stream gets a comment")
    ] = 10.0
    silent_after_s: Annotated[
        Seconds, Meta(description="seconds without a heartbeat after which a worker counts as silent")
    ] = 3.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(description="seconds without a step, while rows run, after which a worker counts as stalled"),
    ] = 120.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="seconds open streams get when the gateway stops")
    ] = 5.0
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"
