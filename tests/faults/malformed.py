"""Requests that no client should send, as bytes: `draw` makes one from dice. No sockets here."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (
    CHAT, TEXT, "/v1/models", "/v1/models/fake", "/v1/status", "/v1/cache", "/health", "/ready", "/", "*",
    "/v1/models/%ff%00/../..", "/v1/chat/completions/", "//v1//models", "/v1/%2e%2e/status", "/é", "",
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
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 17, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "\x00", "\ud800", "é" * 300, "null", "1", [], [[]], [None], [1, "a"],
    {}, {"": {}}, {"type": "text"}, {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
    {"type": "nothing"}, [{"role": "user"}], "data:,", ["a"] * 40, "a" * 5000,
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cp037", "utf-7")


@dataclass(slots=True)
class Request:
    """What is sent on one connection, piece by piece.

    `answers`: how many there must be, in order; None where that is for the parser to say. `changed`:
    the one part of the body that is not as it should be, at its top level.
    """

    pieces: list[bytes]
    answers: int | None = 1
    changed: str | None = None
    kinds: list[str] = field(default_factory=list)

    @property
    def is_head(self) -> bool:
        """The answer to it has no body."""
        return b"".join(self.pieces).startswith(b"HEAD ")


def valid_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Path and body: what is right, with as many parameters as there are."""
    common = {
        "model": "fake", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "seed": 7, "stop": ["never said"], "ignore_eos": False, "n": 1, "logit_bias": {"5": -1.5},
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "priority": 0,
        "cache_salt": "salt", "cache_pin": False, "user": "somebody",
    }  # fmt: skip
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "two words"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "user", "content": "and now"},
    ]
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    chat = {"messages": talk, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3, **more}
    chat |= {"response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "enable_thinking": False}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    text = {"prompt": ["one", "two"], "logprobs": 2, "best_of": 1, "echo": False, "suffix": ""}
    return [
        (CHAT, common | chat), (CHAT, common | chat | streamed), (CHAT, plain), (CHAT, plain | streamed),
        (TEXT, common | text), (TEXT, common | text | streamed), (TEXT, {"prompt": "a b", "max_tokens": 2}),
    ]  # fmt: skip


# --- the body ----------------------------------------------------------------------------------------


def value(dice: random.Random) -> Any:
    """Any; a copy, since what is inside may be changed in its turn."""
    return copy.deepcopy(dice.choice(VALUES))


def change_one_field(dice: random.Random, body: dict[str, Any], request: Request) -> None:
    request.changed = dice.choice(sorted(body))
    body[request.changed] = value(dice)


def change_places(dice: random.Random, body: dict[str, Any], request: Request) -> None:
    """Values of any kind, anywhere; some go, and some come that nobody knows."""
    for _ in range(dice.choice((1, 1, 2, 5))):
        place: Any = body
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = dice.choice(keys) if keys else None
            inside = place[key] if key is not None else None
            if not isinstance(inside, dict | list) or not inside or dice.random() < 0.3:
                break
            place = inside
        match dice.randrange(4):
            case 0 if isinstance(place, dict):
                place[dice.choice(("unknown", "", "\x00", "messages", "n" * 900))] = value(dice)
            case 1 if key is not None:
                del place[key]
            case _ if key is not None:
                place[key] = value(dice)


def write(body: dict[str, Any]) -> bytes:
    # Lone surrogates go as escapes; NaN and Infinity as Python writes them.
    return json.dumps(body, ensure_ascii=True).encode()


def nest(dice: random.Random, text: bytes) -> bytes:
    depth = dice.choice((10, 500, 1000, 30_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")))
    deep = opening * depth + b"1" + closing * dice.choice((depth, depth - 1, 0))
    return text[:-1] + b', "%b": ' % dice.choice((b"messages", b"unknown", b"tools", b"stop")) + deep + b"}"


def double_keys(dice: random.Random, text: bytes) -> bytes:
    second = json.dumps(dice.choice(VALUES)).encode()
    return text[:-1] + b', "%b": %b}' % (dice.choice((b"messages", b"n", b"stream", b"seed")), second)


def write_huge_number(dice: random.Random, text: bytes) -> bytes:
    number = dice.choice(
        (b"1e999", b"-1e999", b"1" * 5000, b"0." + b"0" * 4000 + b"1", b"1e-999", b"0x10", b"01")
    )
    name = dice.choice((b"seed", b"temperature", b"n", b"max_tokens", b"top_k", b"unknown"))
    return text[:-1] + b', "%b": %b}' % (name, number)


def cut_short(dice: random.Random, text: bytes) -> bytes:
    return text[: dice.randrange(len(text))]


def damage(dice: random.Random, text: bytes) -> bytes:
    found = bytearray(text)
    for _ in range(dice.choice((1, 1, 3, 20))):
        place = dice.randrange(len(found)) if found else 0
        match dice.randrange(3):
            case 0 if found:
                found[place] ^= 1 << dice.randrange(8)
            case 1:
                found[place:place] = dice.choice(
                    (b'"', b"{", b"]", b"\\", b"\\ud800", b"\x00", b"\xff\xfe", b",")
                )
            case _:
                del found[place : place + dice.choice((1, 1, 9))]
    return bytes(found) or b" "


def encode_otherwise(dice: random.Random, text: bytes) -> bytes:
    return text.decode().encode(dice.choice(ENCODINGS))


def replace(dice: random.Random, text: bytes) -> bytes:
    """Something else altogether."""
    return dice.choice(
        (b"", b" ", b"null", b"[]", b"{}", b'"text"', b"0", b"\xff\xfe", b"\x00" * 99, b"{" * 99_999,
         b"<xml/>", b"a=b&c=d", b"\xef\xbb\xbf{}", b"NaN", b"\x80\x04K\x01.", dice.randbytes(200), text * 2)
    )  # fmt: skip


def compress(dice: random.Random, text: bytes) -> bytes:
    return gzip.compress(dice.choice((text, bytes(2**22))))


def swell(dice: random.Random, text: bytes) -> bytes:
    return text[:-1] + b', "unknown": "' + b"a" * dice.choice((2**17, 2**17, 2**20)) + b'"}'


ON_TEXT: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    nest, double_keys, write_huge_number, cut_short, cut_short, damage, damage, damage, encode_otherwise,
    replace, compress, swell,
)  # fmt: skip


# --- around the body ---------------------------------------------------------------------------------


def head(method: str, target: str, headers: list[bytes], version: str = "1.1") -> bytes:
    line = f"{method} {target} HTTP/{version}".encode("latin-1", "replace")
    return b"\r\n".join([line, *headers, b"", b""])


def in_chunks(dice: random.Random, text: bytes, request: Request) -> bytes:
    """Chunked, and now and then not as the rules have it."""
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
    """The headers that say how long a body is, and the body as it is sent."""
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


# --- a request ---------------------------------------------------------------------------------------


def draw(dice: random.Random) -> Request:
    """The next request to try."""
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
        change = change_one_field if dice.random() < 0.5 else change_places
        change(dice, body, request)
        request.kinds.append(change.__name__)
    text = write(body)
    if 0.4 < chance < 0.85:
        rewrite = dice.choice(ON_TEXT)
        text, request.changed = rewrite(dice, text), None
        request.kinds.append(rewrite.__name__)
    headers, sent = frame(dice, text, request)
    headers = [b"host: x", b"content-type: application/json", *headers]
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
    headers = [b"host: x"]
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
        parts.append(head("POST", path, [b"host: x", b"content-length: %d" % len(text)]) + text)
    return b"".join(parts)


def _nonsense(dice: random.Random, request: Request) -> bytes:
    """What is hardly HTTP: damaged heads, other protocols, heads that never end."""
    request.kinds.append("nonsense")
    request.answers = None
    path, body = dice.choice(VALID)
    whole = head("POST", path, [b"host: x", b"content-length: 9"]) + write(body)
    return dice.choice(
        (damage(dice, whole), damage(dice, whole), damage(dice, whole), cut_short(dice, whole) or b"P",
         dice.randbytes(300), b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50,
         b"GET /health\r\n", b"GET /health HTTP/1.1\nhost: x\n\n", b"GET " + b"/" * 70_000, b"\x00" * 9)
    )  # fmt: skip


VALID = valid_bodies()
