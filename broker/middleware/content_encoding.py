"""Content-Encoding of request bodies: gzip, deflate and zstd are decoded as they arrive.

Whoever reads the body gets pieces of at most `PIECE_BYTES`, and other work is done between them, so that a
body which decodes to too much is stopped by its reader like any other, and blocks nothing. `bytes_max` bounds
what decodes to nothing, or to little.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.middleware.errors import error_response
from broker.middleware.limits import BodyBudget
from protocol.errors import Code, RequestError

PIECE_BYTES = 64 * 1024
CODINGS_MAX = 4
MEMBERS_MAX = 4096
"""Members of one coding: bgzip makes one of every 64 KiB."""
ZSTD_WINDOW_LOG_MAX = 23
"""8 MiB, the largest window that a body on the web may need (RFC 9659)."""

_ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_HEADER, _LENGTH = b"content-encoding", b"content-length"
_BODILESS = ("GET", "HEAD", "OPTIONS")


class _Decompressor(Protocol):
    """Interface of `ZstdDecompressor`, for one member or frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Inflate:
    """`_Decompressor` of zlib. `wbits`: as there; None: zlib's format, or that without its header, which some
    clients send as deflate."""

    def __init__(self, wbits: int | None) -> None:
        self._inflate = zlib.decompressobj(wbits) if wbits is not None else None
        self._rest = b""
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate is not None and self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data if self._inflate is not None else b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self._rest += data
        if self._inflate is None:
            if len(self._rest) < 2:
                return b""
            has_header = self._rest[0] & 15 == 8 and int.from_bytes(self._rest[:2]) % 31 == 0
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        piece = self._inflate.decompress(self._rest, max_length)
        self._rest = self._inflate.unconsumed_tail
        self.needs_input = not self._rest and len(piece) < max_length
        return piece


class _Zstd:
    """`_Decompressor` of zstd. Its module is imported for the first such body: few clients send one."""

    def __init__(self) -> None:
        zstd: Any = import_module(_ZSTD_MODULE)
        options = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
        self._error: type[Exception] = zstd.ZstdError
        self._frame: _Decompressor = zstd.ZstdDecompressor(options=options)

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return self._frame.needs_input

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._frame.decompress(data, max_length)
        except self._error as error:
            raise ValueError(str(error)) from None


_CODINGS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": lambda: _Inflate(zlib.MAX_WBITS + 16),
    "deflate": lambda: _Inflate(None),
    "zstd": _Zstd,
}
_ALIASES = {"x-gzip": "gzip"}


class _Stage:
    """Decoder of one coding, member after member. `count` is called with the size of output."""

    def __init__(self, coding: str, count: Callable[[int], None]) -> None:
        self._coding = coding
        self._count = count
        self._member: _Decompressor | None = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the data decodes to. Raises `RequestError`."""
        while data or (self._member is not None and not self._member.needs_input):
            if self._member is None:
                self._members += 1
                self._member = _CODINGS[self._coding]()
            if self._members > MEMBERS_MAX:
                raise self._broken(f"it has more than {MEMBERS_MAX} members")
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except (zlib.error, ValueError) as error:
                raise self._broken(str(error)) from None
            data = b""
            if self._member.eof:
                data, self._member = self._member.unused_data, None
            if piece:
                self._count(len(piece))
                yield piece

    def close(self) -> None:
        """Raise `RequestError` if the data ended within a member."""
        if self._member is not None:
            raise self._broken("it ends too early")

    def _broken(self, why: str) -> RequestError:
        message = f"The body is not {self._coding}, which Content-Encoding names: {why[:200]}."
        return RequestError(Code.INVALID_REQUEST, message)


def _pieces(stages: Sequence[_Stage], data: bytes) -> Iterator[bytes]:
    if not stages:
        yield data
        return
    for piece in stages[0].feed(data):
        yield from _pieces(stages[1:], piece)


def codings_of(headers: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """Return the codings of a body in the order in which they are decoded. Raises `RequestError`."""
    named = b",".join(value for name, value in headers if name == _HEADER).decode("latin-1").lower()
    codings = [coding.strip() for coding in named.split(",")]
    codings = [_ALIASES.get(coding, coding) for coding in codings if coding not in ("", "identity")]
    unknown = [coding for coding in codings if coding not in _CODINGS]
    if unknown or len(codings) > CODINGS_MAX:
        which = f"`{unknown[0][:64]}`" if unknown else f"more than {CODINGS_MAX} at once"
        message = f"Content-Encoding can be {', '.join(_CODINGS)} or identity, not {which}."
        raise RequestError(Code.UNSUPPORTED_CONTENT_ENCODING, message)
    return codings[::-1]


class ContentEncodingMiddleware:
    """ASGI middleware that decodes encoded bodies. Windows of zstd are taken out of `budget` while in use."""

    def __init__(
        self, app: ASGIApp, budget: BodyBudget, refusal: Callable[[], RequestError], bytes_max: int
    ) -> None:
        """`refusal`: returns the error for a window that exceeds the budget. `bytes_max`: of any body as sent
        and, on average, as decoded by each coding."""
        self._app = app
        self._budget = budget
        self._refusal = refusal
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            is_bodiless = scope["type"] != "http" or scope["method"] in _BODILESS
            codings = [] if is_bodiless else codings_of(scope["headers"])
        except RequestError as error:
            response = error_response(error, scope)
            response.headers["accept-encoding"] = ", ".join(_CODINGS)
            await response(scope, receive, send)
            return
        if not codings:
            await self._app(scope, receive, send)
            return
        window = 2**ZSTD_WINDOW_LOG_MAX * codings.count("zstd")
        if not self._budget.allocate(window):
            await error_response(self._refusal(), scope)(scope, receive, send)
            return
        headers = [header for header in scope["headers"] if header[0] not in (_HEADER, _LENGTH)]
        body = _DecodedBody(receive, codings, self._bytes_max, lambda: self._budget.free(window))
        try:
            await self._app({**scope, "headers": headers}, body.receive, send)
        finally:
            body.close()


class _DecodedBody:
    """The ASGI messages of a body, decoded. `release` is called once: at its end, or when it is closed."""

    def __init__(
        self, receive: Receive, codings: Sequence[str], bytes_max: int, release: Callable[[], None]
    ) -> None:
        self._receive = receive
        self._stages = [_Stage(coding, self._count) for coding in codings]
        self._pieces: Iterator[bytes] = iter(())
        self._left = bytes_max * (len(codings) + 1)
        self._is_whole = self._is_over = False
        self._release = release

    async def receive(self) -> Message:
        """Return the next piece, or what the client does after the body. Raises `RequestError`."""
        while not self._is_over:
            if (piece := next(self._pieces, None)) is not None:
                await asyncio.sleep(0)
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_whole:
                self.close()
                for stage in self._stages:
                    stage.close()
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._count(len(data))
            self._pieces = _pieces(self._stages, data)
            self._is_whole = not message.get("more_body", False)
        return await self._receive()

    def close(self) -> None:
        """Give the windows back. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._release()

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise RequestError(Code.REQUEST_TOO_LARGE, "The request body is too large.")
