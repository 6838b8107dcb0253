"""Upper bound for the gateway: an ASGI app that only streams prepared events, under the same uvicorn."""

from __future__ import annotations

import argparse
import asyncio
import time

import uvicorn
from starlette.types import Receive, Scope, Send

HEAD = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"fake","choices":[{"index":0,"delta":{"content":"'
)
TAIL = b' "},"logprobs":null,"finish_reason":null}]}\n\n'
EVENT = HEAD + b"turntable" + TAIL


class Ticker:
    """Paces streams like a decode loop: all waiting streams continue together, `step_ms` after the first
    waited."""

    def __init__(self) -> None:
        self._ticks: dict[float, asyncio.Future[bytes]] = {}

    def tick(self, step_ms: float) -> asyncio.Future[bytes]:
        """Return a future of the next tick. Its result is the time of the tick, as the scripted engine
        reports it with `!clock`."""
        if step_ms not in self._ticks:
            loop = asyncio.get_running_loop()
            self._ticks[step_ms] = loop.create_future()
            loop.call_later(step_ms / 1000, self._strike, step_ms)
        return self._ticks[step_ms]

    def _strike(self, step_ms: float) -> None:
        self._ticks.pop(step_ms).set_result(b"%d" % time.monotonic_ns())


ticker = Ticker()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream N events for GET /N, one `send` each; a full connection yields to the event loop. For GET /N/MS,
    send one event every MS milliseconds, at the same moment for all streams."""
    if scope["type"] != "http":
        return
    count, _, step_ms = scope["path"].strip("/").partition("/")
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(int(count or 0)):
        event = HEAD + await ticker.tick(float(step_ms)) + TAIL if step_ms else EVENT
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(
        app,
        port=parser.parse_args().port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
