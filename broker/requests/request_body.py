"""Request bodies: read whole, up to a size."""

from __future__ import annotations

from codecs import BOM_UTF8

from starlette.requests import Request

from protocol.errors import Code, RequestError


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the whole body, without a byte order mark. Raises `RequestError(request_too_large)`, early if
    the size is declared."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks).removeprefix(BOM_UTF8)


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(Code.REQUEST_TOO_LARGE, f"The request body is larger than {bytes_max} bytes.")
