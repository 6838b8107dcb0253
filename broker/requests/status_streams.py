"""Event streams of the status and of orders, bounded in number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import StreamingResponse

from broker.dialects.body import encode
from broker.state import GatewayState
from protocol.errors import Code, RequestError

WATCHERS_MAX = 32
"""Maximum number of open streams of the status and of orders."""
LOOK_S = 0.25
"""Interval in seconds at which a stream looks at what it watches."""


def check_watchers(gateway: GatewayState) -> None:
    """Raise `RequestError` if no more clients can watch."""
    if len(gateway.watchers) >= WATCHERS_MAX:
        message = f"The status stream has reached its limit of {WATCHERS_MAX} clients."
        raise RequestError(Code.TOO_MANY_CONNECTIONS, message, retry_after_s=10.0)


@contextmanager
def watching(gateway: GatewayState) -> Iterator[None]:
    """Count a client that watches."""
    watcher = object()
    gateway.watchers.add(watcher)
    try:
        yield
    finally:
        gateway.watchers.discard(watcher)


def changes_of(
    gateway: GatewayState,
    kind: str,
    read: Callable[[], dict[str, Any]],
    *,
    is_last: Callable[[dict[str, Any]], bool],
    s_max: float,
) -> StreamingResponse:
    """Return a stream with an event of `kind` for each change of a document, until one `is_last`, or for
    `s_max` at most."""

    async def events() -> AsyncIterator[bytes]:
        last, silent_since = b"", time.monotonic()
        until = silent_since + s_max
        with watching(gateway):
            while not gateway.dispatcher.stopping:
                now, document = time.monotonic(), read()
                if (data := encode({"type": kind, kind: document})) != last:
                    last, silent_since = data, now
                    yield b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
                elif now - silent_since >= gateway.settings.keepalive_s:
                    silent_since = now
                    yield b": keep-alive\n\n"
                if is_last(document) or now >= until:
                    return
                await asyncio.sleep(LOOK_S)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
