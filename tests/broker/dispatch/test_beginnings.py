"""Marks of prompts: equal as far as two prompts are, and not a mark further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch.beginnings import (
    HEAD_MARKS_MAX,
    NONE,
    STRIDE_BYTES,
    TAIL_MARKS_MAX,
    Beginnings,
    beginnings,
)
from protocol.conversation import pack
from protocol.messages import Embed, Generate
from protocol.parts import Media, Sampling, Tokenizing
from tests.broker.dispatching import GATEWAY

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
    return Generate(
        incarnation=GATEWAY, id="a", sampling=Sampling(seed=1), messages=pack(list(messages)), **told
    )


def raw(prompt: str | None = None, **told: Any) -> Generate:
    return Generate(incarnation=GATEWAY, id="a", sampling=Sampling(seed=1), prompt=prompt, **told)


def common(one: Beginnings, other: Beginnings) -> int:
    """Bytes that both begin with, as far as marks tell."""
    marks = dict(other.marks)
    return max((size for mark, size in one.marks if mark in marks), default=0)


@given(MESSAGES, MESSAGES)
def test_a_conversation_that_goes_on_begins_with_all_that_it_was(
    before: list[Message], more: list[Message]
) -> None:
    one, other = beginnings(conversation(before)), beginnings(conversation([*before, *more]))
    assert common(other, one) == one.size, "every mark is kept, the last one as well"
    assert [size for _, size in other.marks] == sorted({size for _, size in other.marks})
    assert other.marks[-1][1] == other.size


@given(MESSAGES, st.integers(0, 7))
def test_prompts_have_no_mark_in_common_behind_the_place_where_they_part(
    messages: list[Message], at: int
) -> None:
    at %= len(messages)
    changed = [*messages[:at], {**messages[at], "role": "other"}, *messages[at + 1 :]]
    before = beginnings(conversation(messages[:at])).size if at else 0
    assert common(beginnings(conversation(messages)), beginnings(conversation(changed))) == before


def test_a_long_message_that_grows_is_known_up_to_the_last_whole_stride() -> None:
    text = "The line goes up the valley. " * 400
    one = beginnings(conversation([{"role": "user", "content": text}]))
    other = beginnings(conversation([{"role": "user", "content": text + " And down again."}]))
    assert one.size - STRIDE_BYTES < common(one, other) < one.size


@given(st.text(max_size=9000), st.text(min_size=1, max_size=50))
def test_a_prompt_of_text_or_of_tokens_is_known_stride_by_stride(text: str, more: str) -> None:
    whole = len(text.encode()) // STRIDE_BYTES * STRIDE_BYTES
    assert common(beginnings(raw(text)), beginnings(raw(text + more))) >= whole
    tokens = list(text.encode())
    of_tokens = beginnings(raw(tokens=tokens)), beginnings(raw(tokens=[*tokens, 7]))
    assert common(*of_tokens) == 8 * len(tokens) // STRIDE_BYTES * STRIDE_BYTES


def test_what_stands_before_a_prompt_or_keeps_it_apart_is_part_of_every_mark() -> None:
    plain = conversation([{"role": "user", "content": "x"}])
    tools = pack([{"type": "function", "function": {"name": "f"}}])
    others = [replace(plain, tools=tools), replace(plain, cache_salt="tenant")]
    for other in others:
        assert common(beginnings(plain), beginnings(other)) == 0
    drawn_otherwise = replace(plain, id="b", sampling=Sampling(seed=2, temperature=0.5), max_tokens=9)
    assert beginnings(drawn_otherwise) == beginnings(plain)


def test_the_same_words_beside_another_image_begin_otherwise_from_that_message_on() -> None:
    shown = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    said = [{"role": "user", "content": "Look."}, {"role": "user", "content": shown}]

    def with_images(*digests: str) -> Beginnings:
        media = [Media(frame=n, mime="image/png", sha256=digest * 32) for n, digest in enumerate(digests)]
        return beginnings(conversation([*said, {"role": "user", "content": shown}], media=media))

    one = with_images("aa", "bb")
    assert common(one, with_images("aa", "bb")) == one.size
    assert common(one, with_images("aa", "cc")) == one.marks[1][1]
    assert common(one, with_images("cc", "bb")) == one.marks[0][1]


def test_of_a_very_long_conversation_its_head_and_its_end_are_marked() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(1000)]
    one, next_turn = (beginnings(conversation(messages[:count])) for count in (998, 1000))
    assert len(one.marks) == HEAD_MARKS_MAX + TAIL_MARKS_MAX
    assert common(one, next_turn) == one.size
    forked = beginnings(conversation([*messages[:10], {"role": "user", "content": "else"}]))
    assert common(one, forked) == one.marks[9][1]


@given(st.binary(max_size=60))
def test_what_cannot_be_read_has_no_beginnings_and_raises_nothing(garbage: bytes) -> None:
    request = Generate(
        incarnation=GATEWAY, id="a", sampling=Sampling(seed=1), messages=msgspec.Raw(garbage + b"\xc1")
    )
    assert beginnings(request) == NONE


def test_a_message_nested_too_deep_has_no_beginnings() -> None:
    deep = b"\x91" * 100_000 + b"\x90"
    request = conversation([{"role": "user", "content": "x"}])
    assert beginnings(replace(request, messages=msgspec.Raw(b"\x91" + deep))) == NONE


def test_what_reuses_nothing_has_no_beginnings() -> None:
    texts = Embed(incarnation=GATEWAY, id="e", texts=pack(["a"]), count=1)
    assert beginnings(texts) == NONE
    assert beginnings(raw("x", tokenizing=Tokenizing())) == NONE
    assert beginnings(raw("")).marks == ()
