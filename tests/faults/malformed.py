"""Malformed requests as bytes: `draw` makes one from dice. This module uses no sockets."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from tests.faults.documents import (
    CHAT,
    MESSAGES,
    ON_TEXT,
    TEXT,
    VALID,
    change_one_field,
    change_places,
    cut_short,
    damage,
    write,
)

PATHS = (
    CHAT, TEXT, MESSAGES, "/v1/models", "/v1/models/fake", "/v1/status", "/v1/cache", "/health", "/ready",
    "/", "*", "/v1/models/%ff%00/../..", "/v1/chat/completions/", "//v1//models", "/v1/%2e%2e/status",
    "/é", "",
    "http://elsewhere/v1/models", "/" + "a" * 70_000, "/v1/models/" + "%41" * 900,
)  # fmt: skip
QUERIES = (
    "", "", "?", "?model=fake", "?model=", "?model=" + "x" * 500, "?model=%00%ff", "?model=fake&model=other",
    "?%F0%28%8C%BC=1", "?a=" + "b" * 9000, "?a[]=1&=&&&;", "#part", "?model=\xe9", "? ?",
)  # fmt: skip
METHODS = (
    "GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "P0ST", "PRI",
    "PROPFIND", "", "G" * 300,
)  # fmt: skip
HEADERS: tuple[bytes, ...] = (
    b"content-encoding: gzip", b"content-encoding: br, gzip", b"content-type: text/plain",
    b"content-type: application/json; charset=utf-16", b"content-type: multipart/form-data; boundary=x",
    b"accept: text/event-stream;q=nan", b"accept-encoding: " + b"gzip," * 500, b"expect: 100-continue",
    b"expect: a miracle", b"connection: close", b"connection: upgrade\r\nupgrade: h2c",
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13",
    b"host: a\r\nhost: b", b"x-request-id: " + b"\xff" * 20, b"x-request-id: " + b"a" * 4000,
    b"authorization: Bearer " + b"x" * 5000, b"authorization:", b"cookie: " + b"a=b; " * 2000,
    b"x" * 3000 + b": y", b": no name", b"no colon", b"x y: z", b"x: \x00", b"x: a\r\n folded", b"x:\ty",
    b"\r\n".join(b"x-%d: y" % number for number in range(150)), b"x-big: " + b"a" * 70_000,
    b"range: bytes=0-1", b"transfer-encoding: identity", b"transfer-encoding: gzip, chunked",
    b"origin: null", b"x-forwarded-for: \xe9", b"keep-alive: timeout=-1", b"te: trailers", b"http2-settings:",
)  # fmt: skip


@dataclass(slots=True)
class Request:
    """The bytes sent on one connection, in pieces.

    `answers`: the number of responses expected, in order; None if the parser decides. `changed`: the only
    invalid top-level field of the body.
    """

    pieces: list[bytes]
    answers: int | None = 1
    changed: str | None = None
    kinds: list[str] = field(default_factory=list)

    @property
    def is_head(self) -> bool:
        """Whether the response has no body."""
        return b"".join(self.pieces).startswith(b"HEAD ")


def head(method: str, target: str, headers: list[bytes], version: str = "1.1") -> bytes:
    line = f"{method} {target} HTTP/{version}".encode("latin-1", "replace")
    return b"\r\n".join([line, *headers, b"", b""])


def in_chunks(dice: random.Random, text: bytes, request: Request) -> bytes:
    """Encode the body in chunks, sometimes incorrectly."""
    size, parts = dice.choice((1, 7, 1000, 10**6)), []
    if len(text) > 5000:
        size = 10**6
    for start in range(0, len(text), size):
        part = text[start : start + size]
        parts.append(b"%x\r\n%b\r\n" % (len(part), part))
    parts.append(b"0\r\n\r\n")
    if dice.random() < 0.4:
        request.answers = request.changed = None
        wrong = (b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"5;a=\x00\r\nhello\r\n", b"1\r\nab\r\n", b"")
        parts[dice.randrange(len(parts))] = dice.choice(wrong)
    return b"".join(parts)


def frame(dice: random.Random, text: bytes, request: Request) -> tuple[list[bytes], bytes]:
    """Return the headers for the length of a body, and the body as it is sent."""
    kind = dice.random()
    if kind < 0.82:
        return [b"content-length: %d" % len(text)], text
    if kind < 0.92:
        return [b"transfer-encoding: chunked"], in_chunks(dice, text, request)
    request.answers = request.changed = None
    length = dice.choice((b"-1", b"1e3", b"", b"99999999999999999999", b"+5", b"5, 5", b"0x5", b"\xb2"))
    wrong: tuple[list[bytes], ...] = (
        [b"content-length: " + length],
        [b"content-length: %d" % (len(text) + dice.choice((1, 100, 2**31)))],
        [b"content-length: %d" % max(0, len(text) - dice.choice((1, 5, 50)))],
        [b"content-length: %d" % len(text), b"transfer-encoding: chunked"],
        [b"content-length: 1", b"content-length: %d" % len(text)],
        [],
    )
    return dice.choice(wrong), text


def in_pieces(dice: random.Random, data: bytes) -> list[bytes]:
    if dice.random() < 0.9 or len(data) < 2:
        return [data]
    cuts = sorted(dice.sample(range(1, len(data)), k=min(len(data) - 1, dice.randint(1, 4))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def draw(dice: random.Random) -> Request:
    """Draw the next request."""
    request = Request([])
    kind = dice.random()
    if kind < 0.72:
        data = _post(dice, request)
    elif kind < 0.90:
        data = _ask_elsewhere(dice, request)
    elif kind < 0.95:
        data = _pipeline(dice, request)
    else:
        data = _nonsense(dice, request)
    request.pieces = in_pieces(dice, data)
    return request


def _post(dice: random.Random, request: Request) -> bytes:
    path, body = copy.deepcopy(dice.choice(VALID))
    chance = dice.random()
    if chance < 0.45:
        if dice.random() < 0.5:
            request.changed = change_one_field(dice, body)
        else:
            change_places(dice, body)
        request.kinds.append(f"changed {request.changed or 'places'}")
    text = write(body)
    if 0.4 < chance < 0.85:
        rewrite = dice.choice(ON_TEXT)
        text, request.changed = rewrite(dice, text), None
        request.kinds.append(rewrite.__name__)
    headers, sent = frame(dice, text, request)
    headers = [b"host: localhost", b"content-type: application/json", *headers]
    if dice.random() < 0.25:
        _add_header(dice, headers, request)
    return head("POST", path, headers, dice.choice(("1.1",) * 20 + ("1.0",))) + sent


def _add_header(dice: random.Random, headers: list[bytes], request: Request) -> None:
    added = dice.choice(HEADERS)
    headers.insert(dice.randrange(len(headers) + 1), added)
    request.kinds.append(f"header {added[:20]!r}")
    request.answers = request.changed = None


def _ask_elsewhere(dice: random.Random, request: Request) -> bytes:
    method, path, query = dice.choice(METHODS), dice.choice(PATHS), dice.choice(QUERIES)
    headers = [b"host: localhost"]
    request.kinds.append(f"{method[:9]} {path[:25]}{query[:25]}")
    request.answers = None
    if dice.random() < 0.2:
        _add_header(dice, headers, request)
    return head(method, path + query, headers)


def _pipeline(dice: random.Random, request: Request) -> bytes:
    request.kinds.append("pipelined")
    count = dice.choice((2, 3, 8, 40))
    request.answers = count if count <= 8 else None
    parts = []
    for _ in range(count):
        path, body = dice.choice(VALID)
        text = write(body) if dice.random() < 0.8 else b"{}"
        parts.append(head("POST", path, [b"host: localhost", b"content-length: %d" % len(text)]) + text)
    return b"".join(parts)


def _nonsense(dice: random.Random, request: Request) -> bytes:
    """Return bytes that are barely HTTP: damaged heads, other protocols, endless heads."""
    request.kinds.append("nonsense")
    request.answers = None
    path, body = dice.choice(VALID)
    whole = head("POST", path, [b"host: localhost", b"content-length: 9"]) + write(body)
    return dice.choice(
        (damage(dice, whole), damage(dice, whole), damage(dice, whole), cut_short(dice, whole) or b"P",
         dice.randbytes(300), b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50,
         b"GET /health\r\n", b"GET /health HTTP/1.1\nhost: x\n\n", b"GET " + b"/" * 70_000, b"\x00" * 9)
    )  # fmt: skip
