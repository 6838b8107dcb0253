"""Packed conversations: on the wire as if unpacked, and unchanged after unpacking."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET, Raw

from protocol import wire
from protocol.conversation import Conversation, pack, packed_bytes, unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from tests.factories import request

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "駅はどこ? 🚂"}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_packed_conversation_is_on_the_wire_what_it_would_be_unpacked() -> None:
    parts = pack(MESSAGES), pack(TOOLS)
    sent = request(messages=parts[0], tools=parts[1], template_kwargs=pack({"a": None}))
    assert packed_bytes(sent) == sum(len(bytes(part)) for part in parts)
    [body] = wire.encode(sent)
    document = msgspec.msgpack.decode(body)
    assert (document["messages"], document["tools"]) == (MESSAGES, TOOLS)
    arrived, _ = wire.decode_to_worker([body])
    assert isinstance(arrived, Generate)
    assert arrived == sent
    assert unpack(arrived) == Conversation(MESSAGES, TOOLS, {"a": None})


def test_absent_fields_unpack_to_none() -> None:
    assert unpack(request()) == Conversation(None, None, {})
    assert packed_bytes(request()) == 0
    # Some peers send every field.
    assert unpack(request(messages=pack(None), tools=pack(None))).messages is None


def test_unencodable_or_deeply_nested_value_is_refused() -> None:
    for unencodable in (2**64, "\ud800", object(), {"\udfff": 1}, UNSET):
        with pytest.raises(RequestError, match="cannot be encoded") as caught:
            pack({"k": unencodable})
        assert caught.value.code is Code.INVALID_REQUEST
    value: list[object] = []
    for _ in range(1_000_000):  # deeper than the stack, where only that limits recursion
        value = [value]
    with pytest.raises(RequestError, match="cannot be encoded"):
        pack(value)
    while value:  # unnested here, because the garbage collector would recurse
        value = value.pop()  # type: ignore[assignment]


@pytest.mark.parametrize(
    "packed", [b"", b"\x07", b"\x91\x07", b"\x91\x81\xa1a\xa1\xff", b"\x91" * 100_000 + b"\x00"]
)
def test_malformed_conversation_is_an_invalid_request(packed: bytes) -> None:
    for part in ("messages", "tools"):
        with pytest.raises(RequestError, match="is malformed") as caught:
            unpack(request(**{part: Raw(packed)}))
        assert caught.value.code is Code.INVALID_REQUEST
