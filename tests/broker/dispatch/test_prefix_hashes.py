"""Prefix hashes of prompts: equal exactly as far as two prompts are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch.prefix_hashes import (
    HEAD_HASHES_MAX,
    NONE,
    STRIDE_BYTES,
    TAIL_HASHES_MAX,
    PrefixHashes,
    prefix_hashes,
)
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.types import Media, Sampling, TokenizeOptions
from tests.factories import embed, request

Message = dict[str, Any]

MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.one_of(st.text(max_size=20), st.text(min_size=1, max_size=3).map(lambda t: t * 2000)),
    ),
    min_size=1,
    max_size=8,
)


def conversation(messages: Sequence[Message], **told: Any) -> Generate:
    return request(messages=list(messages), **told)


def raw(prompt: str | None = None, **told: Any) -> Generate:
    return request(prompt=prompt, **told)


def common(one: PrefixHashes, other: PrefixHashes) -> int:
    """Return the size of the common prefix in bytes, as far as the hashes show."""
    hashes = dict(other.hashes)
    return max((size for mark, size in one.hashes if mark in hashes), default=0)


@given(MESSAGES, MESSAGES, st.integers(0, 7))
def test_a_conversation_that_goes_on_begins_with_all_that_it_was_and_another_up_to_where_they_part(
    before: list[Message], more: list[Message], at: int
) -> None:
    one, other = prefix_hashes(conversation(before)), prefix_hashes(conversation([*before, *more]))
    assert common(other, one) == one.size, "every hash is preserved, the last one too"
    assert [size for _, size in other.hashes] == sorted({size for _, size in other.hashes})
    assert other.hashes[-1][1] == other.size
    at %= len(before)
    changed = prefix_hashes(conversation([*before[:at], {**before[at], "role": "other"}, *before[at + 1 :]]))
    kept = prefix_hashes(conversation(before[:at])).size if at else 0
    assert common(one, changed) == kept


@given(st.text(max_size=9000), st.text(min_size=1, max_size=50))
def test_a_prompt_of_text_or_of_tokens_is_known_stride_by_stride(text: str, more: str) -> None:
    whole = len(text.encode()) // STRIDE_BYTES * STRIDE_BYTES
    assert common(prefix_hashes(raw(text)), prefix_hashes(raw(text + more))) >= whole
    long, longer = ([{"role": "user", "content": "." * STRIDE_BYTES + said}] for said in (text, text + more))
    one = prefix_hashes(conversation(long))
    assert one.size - STRIDE_BYTES < common(one, prefix_hashes(conversation(longer))) <= one.size
    tokens = list(text.encode())
    of_tokens = prefix_hashes(raw(tokens=tokens)), prefix_hashes(raw(tokens=[*tokens, 7]))
    assert common(*of_tokens) == 8 * len(tokens) // STRIDE_BYTES * STRIDE_BYTES


def test_prefix_hashes_include_tools_and_cache_salt_but_not_sampling_params() -> None:
    plain = conversation([{"role": "user", "content": "x"}])
    tools = pack([{"type": "function", "function": {"name": "f"}}])
    others = [replace(plain, tools=tools), replace(plain, cache_salt="tenant")]
    for other in others:
        assert common(prefix_hashes(plain), prefix_hashes(other)) == 0
    drawn_otherwise = replace(plain, id="b", sampling=Sampling(seed=2, temperature=0.5), max_tokens=9)
    assert prefix_hashes(drawn_otherwise) == prefix_hashes(plain)


def test_the_same_words_beside_another_image_begin_otherwise_from_that_message_on() -> None:
    shown = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    said = [{"role": "user", "content": "Look."}, {"role": "user", "content": shown}]

    def with_images(*digests: str) -> PrefixHashes:
        media = [Media(frame=n, mime="image/png", sha256=digest * 32) for n, digest in enumerate(digests)]
        return prefix_hashes(conversation([*said, {"role": "user", "content": shown}], media=media))

    one = with_images("aa", "bb")
    assert common(one, with_images("aa", "bb")) == one.size
    assert common(one, with_images("aa", "cc")) == one.hashes[1][1]
    assert common(one, with_images("cc", "bb")) == one.hashes[0][1]


def test_of_a_very_long_conversation_its_head_and_its_end_are_marked() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(1000)]
    one, next_turn = (prefix_hashes(conversation(messages[:count])) for count in (998, 1000))
    assert len(one.hashes) == HEAD_HASHES_MAX + TAIL_HASHES_MAX
    assert common(one, next_turn) == one.size
    forked = prefix_hashes(conversation([*messages[:10], {"role": "user", "content": "else"}]))
    assert common(one, forked) == one.hashes[9][1]


def test_request_without_prefix_reuse_has_no_prefix_hashes() -> None:
    assert prefix_hashes(embed()) == NONE
    assert prefix_hashes(raw("x", tokenizing=TokenizeOptions())) == NONE
    assert prefix_hashes(raw("")).hashes == ()
    assert prefix_hashes(request(messages=msgspec.Raw(b"[]\xc1"))) == NONE
    too_deep = msgspec.Raw(b"\x91" + b"\x91" * 100_000 + b"\x90")
    assert prefix_hashes(replace(conversation([{"role": "user", "content": "x"}]), messages=too_deep)) == NONE
