"""Rendering of a flight's output as Anthropic's events, document or error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.messages.answer import PING, MessageDocumentRenderer, MessageSseRenderer, message
from broker.dialects.anthropic import error_object
from broker.dialects.openai import failure
from broker.dialects.tools import as_text, is_whole
from broker.dispatch.flight import Item
from protocol.arguments import object_in
from protocol.errors import KINDS, Code, RequestError
from protocol.types import CallDelta, Delta, Usage
from tests import factories
from tests.factories import reused

accepted = partial(factories.accepted, prompt_tokens=12)
finished = partial(factories.finished, prompt=12, tokens=3)
failed = partial(factories.failed, message="It broke.")
BEGUN = message("msg_1", "org/m")


def delta(text: str = "", thought: str = "", *calls: CallDelta) -> Delta:
    return factories.delta(text, reasoning=thought, calls=[*calls])


def call(index: int, arguments: str, name: str = "", id: str = "") -> CallDelta:
    return CallDelta(index=index, id=id, name=name, arguments=arguments)


def read_events(sse: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Each SSE event must bear the name of its type."""
    events = []
    for event in sse.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        events.append(document)
    return events


def streamed(*items: Item) -> list[dict[str, Any]]:
    """Return the events of a complete stream, without pings."""
    return [e for e in read_events(MessageSseRenderer(BEGUN).feed([(0, [*items])])) if e["type"] != "ping"]


def whole(*items: Item) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(MessageDocumentRenderer(BEGUN).feed([(0, [*items])]))
    return document


def signature(thought: str) -> str:
    return "rh1_" + sha256(thought.encode()).hexdigest()


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join events into a message, as Anthropic documents. Asserts their order. What broke off has its
    `arguments`."""
    first, *rest = events
    assert first["type"] == "message_start"
    built: dict[str, Any] = first["message"]
    open: dict[str, Any] | None = None
    arguments, is_broken = "", False
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert open is None
                assert event["index"] == len(built["content"])
                open, arguments = event["content_block"], ""
                built["content"].append(open)
            case "content_block_delta":
                assert open is not None
                assert event["index"] == len(built["content"]) - 1
                kind, gain = event["delta"].pop("type"), event["delta"]
                arguments += gain.get("partial_json", "")
                for field in gain.keys() - {"partial_json"}:
                    assert kind == f"{field}_delta"
                    open[field] += gain[field]
            case "content_block_stop":
                assert open is not None
                assert event["index"] == len(built["content"]) - 1
                if open["type"] == "tool_use" and is_whole(arguments):
                    open["input"] = json.loads(arguments)
                elif open["type"] == "tool_use":  # what a client must not call is text in the document
                    open["arguments"], is_broken = arguments, True
                open = None
            case "message_delta":
                assert open is None
                built |= event["delta"] | {"usage": event["usage"]}
    assert [event["type"] for event in rest[-2:]] == ["message_delta", "message_stop"]
    assert not is_broken or built["stop_reason"] == "max_tokens"
    return built


def without_broken(content: list[dict[str, Any]], *, is_cut: bool) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a document. `is_cut`: `max_tokens` has cut the answer, so its last call is one."""
    for block in content:
        if (arguments := block.pop("arguments", None)) is None:
            yield block
        elif is_cut and block is content[-1]:
            yield block | {"input": object_in(arguments, with_cut_string=False) or {}}
        else:
            yield {"type": "text", "text": as_text(block["name"], arguments)}


# --- stream and document agree -----------------------------------------------------------------------


@st.composite
def answers(draw: st.DrawFn) -> list[Item]:
    """Worker output: channels in any order, calls in pieces, the last perhaps unfinished."""
    texts = st.text('ab \n駅🚂"\\', max_size=4)
    deltas: list[Delta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["said", "called"]), max_size=8)):
        if kind == "said":
            deltas.append(delta(draw(texts), draw(texts)))
            continue
        written = json.dumps(draw(st.dictionaries(texts, texts | st.integers(), max_size=2)))
        cut = draw(st.integers(0, len(written)))
        text = draw(texts)
        deltas.append(delta(text, "", call(calls, written[:cut], f"tool{calls}", f"call_{calls}")))
        deltas.append(delta("", "", call(calls, written[cut:])))
        calls += 1
    if deltas and draw(st.booleans()):
        deltas.pop()
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    stop = draw(st.sampled_from(["", "\n\nHuman:"]))
    cached = draw(st.integers(0, 12))
    end = finished(reason=reason, stop=stop, cached=cached)
    return [accepted(), reused(tokens=cached), *deltas, end]


@settings(max_examples=60)
@given(answers(), st.data())
def test_events_of_a_stream_cut_anywhere_make_the_document_of_all_output(
    items: list[Item], data: st.DataObject
) -> None:
    stream, sse, left = MessageSseRenderer(BEGUN), b"", list(items)
    while left:
        count = data.draw(st.integers(1, len(left)))
        sse += stream.feed([(0, left[:count])])
        left = left[count:]
    assert stream.over
    document = whole(*items)
    events = [event for event in read_events(sse) if event["type"] != "ping"]
    message = joined(events)
    message["content"] = [*without_broken(message["content"], is_cut=document["stop_reason"] == "max_tokens")]
    written: dict[int, str] = {}
    for item in items:
        for part in item.calls if isinstance(item, Delta) else ():
            written[part.index] = written.get(part.index, "") + part.arguments
    broken = [arguments for arguments in written.values() if not is_whole(arguments)]
    if broken:
        assert document["stop_reason"] != "max_tokens" or items[-1].reason == "length"
        message["stop_reason"] = document["stop_reason"]
    assert message == document
    content, deltas = document["content"], [item for item in items if isinstance(item, Delta)]
    if broken:
        return
    for channel, kind in (("text", "text"), ("reasoning", "thinking")):
        blocks = "".join(block[kind] for block in content if block["type"] == kind)
        output = "".join(getattr(item, channel) for item in deltas)
        assert "".join(blocks.split()) == "".join(output.split())
    begun = [(c.id, c.name) for item in deltas for c in item.calls if c.name]
    assert [(b["id"], b["name"]) for b in content if b["type"] == "tool_use"] == begun
    assert all(block["text"].strip() for block in content if block["type"] == "text")


def test_a_stream_is_exactly_these_events() -> None:
    output = [reused(tokens=8), delta("", "Hm."), delta("\n\n"), delta('"駅"'), delta(" 🚂")]
    sse = MessageSseRenderer(BEGUN).feed([(0, [accepted(), *output])])
    events = [
        '{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
        '"model":"org/m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":4,'
        '"cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":0}}}',
        '{"type":"ping"}',
        '{"type":"content_block_start","index":0,"content_block":'
        '{"type":"thinking","thinking":"","signature":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm."}}',
        '{"type":"content_block_delta","index":0,"delta":'
        f'{{"type":"signature_delta","signature":"{signature("Hm.")}"}}}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"\\n\\n\\"駅\\""}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":" 🚂"}}',
    ]
    written = (f"event: {json.loads(event)['type']}\ndata: {event}\n\n" for event in events)
    assert sse.decode() == "".join(written)


def test_a_document_is_exactly_this() -> None:
    items = [
        delta("", "Where is it?"),
        delta("Let me look.", "", call(0, "", "find", "call_0")),
        delta("", "", call(0, '{"what": '), call(0, '"駅"}')),
        delta("\n\n", "", call(1, "{}", "stop", "call_1")),  # white space alone makes no block
    ]
    usage = Usage(prompt_tokens=12, completion_tokens=3, cached_tokens=8, reasoning_tokens=2)
    assert whole(accepted(), *items, finished(reason="tool_calls", stop="END", usage=usage)) == {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "org/m",
        "content": [
            {"type": "thinking", "thinking": "Where is it?", "signature": signature("Where is it?")},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_0", "name": "find", "input": {"what": "駅"}},
            {"type": "tool_use", "id": "call_1", "name": "stop", "input": {}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {
            "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8,
            "output_tokens": 3, "output_tokens_details": {"thinking_tokens": 2},
        },
    }  # fmt: skip


def test_cached_tokens_are_reported_at_start_if_available_and_always_at_end() -> None:
    end = finished(cached=8)
    stream = MessageSseRenderer(BEGUN)
    early = streamed(accepted(), reused(tokens=8), end)
    late = read_events(stream.feed([(0, [accepted()])]) + stream.feed([(0, [reused(tokens=8), end])]))
    for events, first in ((early, 8), (late, 0)):
        usages = [event.get("message", event).get("usage") for event in events]
        assert [usage["cache_read_input_tokens"] for usage in usages if usage] == [first, 8]


@pytest.mark.parametrize("begun", [[], [accepted(), delta("a")]])
def test_a_failure_in_a_stream_is_an_event_and_the_last_one(begun: list[Item]) -> None:
    stream = MessageSseRenderer(BEGUN, "req_7")
    assert stream.due() + stream.keepalive() == PING
    stream.feed([(0, begun)])
    [error] = read_events(stream.feed([(0, [failed(code="model_loading"), finished()])]))
    assert error == {
        "type": "error", "error": {"type": "overloaded_error", "message": "It broke."}, "request_id": "req_7",
    }  # fmt: skip
    assert stream.over
    assert stream.feed([(0, [delta("late")])]) == b""


TYPES = {
    Code.INVALID_REQUEST: "invalid_request_error", Code.INVALID_API_KEY: "authentication_error",
    Code.MODEL_NOT_FOUND: "not_found_error", Code.REQUEST_TOO_LARGE: "request_too_large",
    Code.RATE_LIMIT_EXCEEDED: "rate_limit_error", Code.TEXT_GENERATION_BUSY: "overloaded_error",
    Code.ENGINE_ERROR: "api_error", Code.DEADLINE_EXCEEDED: "timeout_error",
}  # fmt: skip
OTHERS = {"permission_error"}


@pytest.mark.parametrize("code", Code)
def test_every_error_has_a_type_that_anthropics_clients_know(code: Code) -> None:
    document = error_object(RequestError(code, "Because."), "req_1")
    kind = document["error"]["type"]
    told = {"type": kind, "message": "Because."}
    assert document == {"type": "error", "error": told, "request_id": "req_1"}
    assert kind == TYPES.get(code, kind)
    assert kind in {*TYPES.values(), *OTHERS}
    # A retryable error has a type that means temporary load.
    assert (kind in ("overloaded_error", "rate_limit_error")) == KINDS[code].retryable


def test_errors_are_in_the_words_that_agents_know() -> None:
    """The parameter is named once; a prompt that is too long has Anthropic's wording."""
    for words in ("Not an image.", "'messages[0]' is no image."):
        told = error_object(RequestError(Code.INVALID_MEDIA, words, param="messages[0]"))
        assert told["error"]["message"].count("messages[0]") == 1
    numbers = {"prompt_tokens": 9000, "context_length": 8192}
    said = failed(code="context_length_exceeded", message="Too long.", details=numbers)
    too_long = "prompt is too long: 9000 tokens > 8192 maximum"
    assert error_object(failure(said))["error"]["message"] == too_long
