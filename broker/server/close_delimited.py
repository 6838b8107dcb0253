"""Close-delimited responses, for clients of HTTP/1.0, which cannot read chunks (RFC 9112, section 6.1).

uvicorn sends every response without a length in chunks. Here the end of the connection ends such a response;
uvicorn keeps no connection of HTTP/1.0 open.
"""

from __future__ import annotations

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def close_delimited(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return an ASGI `send` for the request of `cycle` that sends a body without a length as it is."""
    is_unframed = False

    async def send_unframed(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_unframed:
                cycle.chunked_encoding = False  # None would let uvicorn choose chunks
        elif is_unframed:
            # Without chunks, uvicorn compares what is sent with the declared length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed
