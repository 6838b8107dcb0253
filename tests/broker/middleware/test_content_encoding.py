"""Content-Encoding of request bodies, decoded within the bounds of any body."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from broker.middleware.content_encoding import CODINGS_MAX
from tests.broker.application import CHAT, House, house_with_worker
from tests.broker.asgi import Exchange

ZSTD: Any = import_module("backports.zstd")
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),
    "deflate": zlib.compress,
    "Deflate": lambda body: zlib.compress(body, wbits=-15),
    "zstd": lambda body: bytes(ZSTD.compress(body[:9]) + ZSTD.compress(body[9:])),
    "identity": bytes,
    "gzip , zstd": lambda body: bytes(ZSTD.compress(gzip.compress(body))),
    "identity, , gzip": gzip.compress,
}


def sent(house: House, coding: str, *chunks: bytes) -> Exchange:
    length = (b"content-length", b"%d" % sum(map(len, chunks)))
    return Exchange(house.app, "POST", CHAT, chunks, headers=[(b"content-encoding", coding.encode()), length])


@pytest.mark.parametrize("coding", ENCODED)
@pytest.mark.parametrize("step", [1, 2**20])
async def test_a_body_is_decoded(coding: str, step: int, house: House) -> None:
    body = ENCODED[coding](BODY)
    exchange = sent(house, coding, *(body[at : at + step] for at in range(0, len(body), step)))
    assert b"hello" in (await house.serve(exchange, "hello")).body


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "gzip , zstd"])
async def test_a_broken_body_is_refused_and_holds_nothing(coding: str, house: House) -> None:
    body = ENCODED[coding](BODY)
    for broken in (body[:-1], body + b"\xff\xfe\xfd", BODY, b"\0" * 20):
        answer = sent(house, coding, broken)
        assert await answer.refusal() == (400, "invalid_request", None)
        assert "Content-Encoding" in answer.error["message"]
    assert (await sent(house, coding, b"").end()).status == 400  # no JSON


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "gzip , zstd"])
async def test_what_decodes_to_too_much_is_refused(coding: str) -> None:
    house = house_with_worker(body_bytes_max=2**20, body_budget_bytes=2**25)
    refused = await sent(house, coding, ENCODED[coding](bytes(2**26))).refusal()
    assert refused == (413, "request_too_large", None)
    assert b"hello" in (await house.serve(sent(house, coding, ENCODED[coding](BODY)), "hello")).body


async def test_many_members_without_content_are_refused(house: House) -> None:
    answer = await sent(house, "gzip", gzip.compress(b"") * 5000).end()
    assert (answer.status, "members" in answer.error["message"]) == (400, True)


@pytest.mark.parametrize("coding", ["br", "gzip, compress", "\xff", ",".join(["gzip"] * (CODINGS_MAX + 1))])
async def test_other_encodings_are_named_with_those_that_can_be_used(coding: str, house: House) -> None:
    answer = sent(house, coding, BODY)
    assert await answer.refusal() == (415, "unsupported_content_encoding", None)
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert (await house.get("/v1/models", content_encoding="br").end()).status == 200


async def test_bodies_are_unicode(house: House) -> None:
    assert b"hello" in (await house.serve(sent(house, "", b"\xef\xbb\xbf" + BODY), "hello")).body
    for body, why in ((BODY.decode().encode("utf-16"), "UTF-16"), (BODY.replace(b"h", b"\xe9"), "not UTF-8")):
        answer = await sent(house, "", body).end()
        assert (answer.status, why in answer.error["message"]) == (400, True)
