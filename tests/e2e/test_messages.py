"""Anthropic's messages API over HTTP with its client, on the scripted worker and the embedded model."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.dialects import tool

NOTE = tool("messages", "note", "words")
THREE = "!think=3 !call=3 !tokens=30"
"""Three reasoning tokens, two words, three calls of five tokens each, and ten more words."""
QUESTION = "Repeat: Quito"


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


def blocks(message: Any) -> list[dict[str, Any]]:
    """Return the content blocks without ids and signatures, which must be present."""
    read: list[dict[str, Any]] = [block.model_dump(exclude_none=True) for block in message.content]
    for block in read:
        assert block.pop("id", "id")
        assert block.pop("signature", "signature")
    return read


# --- scripted worker -----------------------------------------------------------------------------------


def test_reasoning_text_and_calls_are_blocks_in_order_streamed_and_whole(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**asked(THREE, tools=[NOTE]))
    assert [block.type for block in whole.content] == ["thinking", "text", *["tool_use"] * 3, "text"]
    for block in whole.content:
        if block.type == "tool_use":
            assert block.name == "note"
            assert len(str(block.input["words"]).split()) == 4
    assert whole._request_id
    with claude.messages.stream(**asked(THREE, tools=[NOTE])) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.model) == (whole.stop_reason, whole.model) == ("tool_use", "fake")
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 31  # including the end token
    assert {"text", "thinking", "signature", "input_json"} <= set(kinds)


def test_call_that_max_tokens_cuts_is_the_last_block(claude: anthropic.Anthropic) -> None:
    for tokens in (6, 12):
        whole = claude.messages.create(**asked(THREE, tools=[NOTE]) | {"max_tokens": tokens})
        with claude.messages.stream(**asked(THREE, tools=[NOTE]) | {"max_tokens": tokens}) as stream:
            streamed = stream.get_final_message()
        assert whole.stop_reason == streamed.stop_reason == "max_tokens"
        assert blocks(whole)[-1]["type"] == blocks(streamed)[-1]["type"] == "tool_use"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"messages": [{"role": "user", "content": "!fail=0"}]}, anthropic.InternalServerError),
    ],
)
def test_errors_are_those_that_the_client_knows(
    claude: anthropic.Anthropic, body: dict[str, Any], error: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(error) as caught:
        claude.messages.create(**asked("hi") | body)
    told: Any = caught.value.body
    assert told["type"] == "error"
    assert told["request_id"] == caught.value.request_id


def test_a_stream_that_fails_raises(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        list(claude.messages.create(**asked("!fail=3"), stream=True))


# --- embedded model ------------------------------------------------------------------------------------


def test_why_it_ended_is_told(claude: anthropic.Anthropic) -> None:
    def ends(**fields: Any) -> tuple[str | None, str | None]:
        whole = claude.messages.create(**asked(QUESTION, **fields) | {"model": "pocket"})
        with claude.messages.stream(**asked(QUESTION, **fields) | {"model": "pocket"}) as stream:
            streamed = stream.get_final_message()
        assert blocks(streamed) == blocks(whole)
        assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        return whole.stop_reason, whole.stop_sequence

    assert ends() == ("end_turn", None)
    assert ends(stop_sequences=["never", "ito"]) == ("stop_sequence", "ito")
    assert ends(max_tokens=1) == ("max_tokens", None)


def test_thoughts_are_blocks_of_their_own_when_they_are_asked_for(claude: anthropic.Anthropic) -> None:
    body = asked(QUESTION, thinking={"type": "enabled", "budget_tokens": 1024}) | {"model": "pocket"}
    message = claude.messages.create(**body)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.usage.output_tokens_details.thinking_tokens == 10
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        silent = claude.messages.create(**body | {"thinking": thinking})
        assert [block.type for block in silent.content] == ["text"]
    limited = claude.messages.create(**body | {"thinking": {"type": "enabled", "budget_tokens": 4}})
    assert limited.usage.output_tokens_details.thinking_tokens == 4


def test_tokens_are_counted_as_they_are_run(claude: anthropic.Anthropic) -> None:
    prompt: dict[str, Any] = {
        "model": "pocket",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "How long is this?"}],
        "tools": [NOTE],
    }
    counted = claude.messages.count_tokens(**prompt).input_tokens
    usage = claude.messages.create(max_tokens=4, **prompt).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > claude.messages.count_tokens(**prompt | {"tools": []}).input_tokens > 10
    messages = asked("word " * 40_000)["messages"]
    tokens = claude.messages.count_tokens(model="pocket", messages=messages).input_tokens
    with pytest.raises(anthropic.BadRequestError, match=f"too long: {tokens} tokens > 32768 maximum"):
        claude.messages.create(model="pocket", max_tokens=4, messages=messages)
