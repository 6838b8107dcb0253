"""The ceiling: an ASGI app that streams ready-made events and does nothing else, under the same uvicorn."""

from __future__ import annotations

import argparse

import uvicorn
from starlette.types import Receive, Scope, Send

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"fake","choices":[{"index":0,"delta":{"content":"turntable "},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """GET /N streams N events, one `send` each; the loop gets a turn when the connection is full."""
    if scope["type"] != "http":
        return
    count = int(scope["path"].strip("/") or 0)
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(count):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
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
