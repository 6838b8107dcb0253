"""HTTP parser for a server that upgrades to no other protocol."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import httptools

_OFFER = b"upgrade"


class Parser(httptools.HttpRequestParser):
    """Parser that keeps the data behind a request with an `Upgrade` header, in `rest`.

    httptools treats the offer as accepted: the request ends with its head, and the data behind it is not
    HTTP.
    """

    rest = b""

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self.rest = bytes(data[offer.args[0] :])
            raise


def authority_of(url: bytes) -> bytes | None:
    """Return the authority of a request target in absolute form, as for a proxy; None for any other form."""
    if url.startswith(b"/") or b"://" not in url:
        return None
    return re.split(rb"[/?#]", url.partition(b"://")[2], maxsplit=1)[0]


def offers_upgrade(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether there is an `Upgrade` header. `headers`: with names in lower case."""
    return any(name == _OFFER for name, _ in headers)


def head_without_offer(
    method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """Return the request's head without the `Upgrade` header, which a server may ignore (RFC 9110, 7.8)."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != _OFFER]
    return b"\r\n".join([*lines, b"", b""])
