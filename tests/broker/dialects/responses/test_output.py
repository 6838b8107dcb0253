"""Rendering of responses: the events of a stream, and the document that ends it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects import renderers
from broker.dialects.responses.answer import ResponseBuilder, ResponseDocumentRenderer, ResponseSseRenderer
from broker.dialects.responses.encrypted_content import unseal
from broker.dialects.responses.output import OutputStyle, ResponseOutput
from broker.dialects.responses.tools import QualifiedName
from broker.dispatch.flight import Item
from protocol.errors import RequestError
from protocol.types import CallDelta, Delta, TokenLogprob, Usage
from tests import factories
from tests.factories import accepted

STEM = "0123456789abcdef01234567"
ACCEPTED = accepted(prompt_tokens=5)
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3, reasoning_tokens=2)
finished = partial(factories.finished, usage=USAGE)
failed = partial(factories.failed, message="it broke")


def delta(
    text: str = "", *, reasoning: str = "", calls: tuple[CallDelta, ...] = (), likely: tuple[Any, ...] = ()
) -> Delta:
    return factories.delta(text, reasoning=reasoning, calls=[*calls], likelihoods=[*likely])


def call(index: int, name: str = "", arguments: str = "") -> CallDelta:
    return CallDelta(index=index, id=f"call_{index}" if name else "", name=name, arguments=arguments)


def answer(style: OutputStyle = OutputStyle(), kept: list[Any] | None = None) -> ResponseBuilder:  # noqa: B008 - the default is frozen
    keep = None if kept is None else kept.append
    return ResponseBuilder(
        {"id": f"resp_{STEM}", "output": []}, ResponseOutput(STEM, style), clock=lambda: 99.5, keep=keep
    )


def events(sse: bytes) -> list[Any]:
    read = []
    for block in sse.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def stream(*items: Item, style: OutputStyle = OutputStyle()) -> list[Any]:  # noqa: B008
    renderer = ResponseSseRenderer(answer(style))
    sse = b"".join(renderer.feed([(0, [item])]) for item in items)
    assert renderer.over
    return events(sse)


def whole(*items: Item, style: OutputStyle = OutputStyle()) -> Any:  # noqa: B008
    renderer = ResponseDocumentRenderer(answer(style))
    sent = [renderer.feed([(0, [item])]) for item in items]
    assert renderer.over
    assert not any(sent[:-1])
    return json.loads(sent[-1])


# --- order of events ---------------------------------------------------------------------------------


def test_a_text_is_told_in_openais_order() -> None:
    told = stream(ACCEPTED, delta("all "), delta("aboard"), finished())
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[0]["response"]["status"] == told[1]["response"]["status"] == "in_progress"
    message = told[2]["item"]
    assert message == {
        "id": f"msg_{STEM}_0",
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    part = {"type": "output_text", "text": "all aboard", "annotations": [], "logprobs": []}
    assert told[7]["part"] == part
    assert told[8]["item"] == message | {"status": "completed", "content": [part]}
    assert told[9]["response"]["output"] == [told[8]["item"]]
    assert told[9]["response"]["completed_at"] == 99
    assert told[9]["response"]["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_thought_text_and_calls_are_items_one_after_another() -> None:
    first, rest = call(0, "note", '{"a"'), call(0, arguments=": 1}")
    steps = [delta(reasoning="hm"), delta("so", calls=(first,)), delta(calls=(rest, call(1, "note", "{}")))]
    told = stream(ACCEPTED, *steps, finished(reason="tool_calls"))
    assert [event["type"].removeprefix("response.") for event in told[2:-1]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    [thought, message, one, two] = told[-1]["response"]["output"]
    assert (thought["summary"], thought["content"]) == ([], [{"type": "reasoning_text", "text": "hm"}])
    assert message["content"][0]["text"] == "so"
    assert one == {
        "id": f"fc_{STEM}_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "note",
        "arguments": '{"a": 1}',
    }
    assert (two["call_id"], two["arguments"]) == ("call_1", "{}")


def test_reasoning_is_streamed_as_summary_when_summaries_are_requested() -> None:
    told = stream(ACCEPTED, delta(reasoning="hm"), finished(), style=OutputStyle(summarized=True))
    assert [event["type"].removeprefix("response.") for event in told[2:-1]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert all(event["summary_index"] == 0 for event in told[3:-2])
    [thought] = told[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in thought


def test_a_thought_is_sealed_only_where_that_was_asked_for() -> None:
    items = [ACCEPTED, delta(reasoning="hm "), delta(reasoning="駅"), finished()]
    [thought] = whole(*items, style=OutputStyle(sealed=True))["output"]
    assert unseal(thought["encrypted_content"]) == "hm 駅"
    assert "encrypted_content" not in whole(*items)["output"][0]


def test_a_function_of_a_namespace_is_called_by_both_of_its_names() -> None:
    style = OutputStyle(namespaces={"mcp__files__read": QualifiedName("mcp__files__", "read")})
    told = stream(ACCEPTED, delta(calls=(call(0, "mcp__files__read", "{}"),)), finished(), style=style)
    assert (told[2]["item"]["namespace"], told[2]["item"]["name"]) == ("mcp__files__", "read")
    done = next(event for event in told if event["type"].endswith("arguments.done"))
    assert done["name"] == "read"


def test_likelihoods_stand_in_each_delta_and_in_the_part() -> None:
    likely = TokenLogprob(bytes=b"a", logprob=-0.5, top=[(b"b", -1.0)])
    told = stream(ACCEPTED, delta("", likely=(likely,)), delta("a", likely=(likely,)), finished())
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    entry["top_logprobs"] = [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    deltas = [event for event in told if event["type"].endswith("text.delta")]
    assert [(one["delta"], one["logprobs"]) for one in deltas] == [("", [entry]), ("a", [entry])]
    assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry, entry]


# --- end of a response -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "output"),
    [
        ([], [("message", "incomplete")]),
        ([delta(reasoning="hm")], [("reasoning", "incomplete")]),
        (
            [delta("a"), delta(calls=(call(0, "note", "{"),))],
            [("message", "completed"), ("function_call", "incomplete")],
        ),
    ],
)
def test_an_answer_that_is_cut_off_says_so(steps: list[Delta], output: list[tuple[str, str]]) -> None:
    told = stream(ACCEPTED, *steps, finished(reason="length"))
    assert told[-1]["type"] == "response.incomplete"
    document = told[-1]["response"]
    assert (document["status"], document["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [(item["type"], item["status"]) for item in document["output"]] == output
    assert document == whole(ACCEPTED, *steps, finished(reason="length"))


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    [message] = whole(ACCEPTED, finished())["output"]
    assert (message["status"], message["content"][0]["text"]) == ("completed", "")


def test_a_failure_before_anything_is_a_status_code() -> None:
    for renderer in (ResponseSseRenderer(answer()), ResponseDocumentRenderer(answer())):
        with pytest.raises(RequestError, match="it broke"):
            renderer.feed([(0, [ACCEPTED, failed()])])


def test_a_failure_in_a_stream_is_told_to_sdks_and_to_agents() -> None:
    *_, error, last = stream(ACCEPTED, delta("a"), failed())
    assert error == {
        "type": "error",
        "sequence_number": error["sequence_number"],
        "code": "engine_error",
        "message": "it broke",
        "param": None,
        "error": {"type": "server_error", "code": "engine_error", "message": "it broke", "param": None},
    }
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "engine_error", "message": "it broke"}


def test_failed_response_is_not_stored() -> None:
    kept: list[Any] = []
    renderer = ResponseSseRenderer(answer(kept=kept))
    renderer.feed([(0, [ACCEPTED])])
    renderer.feed([(0, [failed()])])
    assert kept == []


def test_a_failure_after_a_keepalive_ends_the_response_that_it_began() -> None:
    renderer = ResponseSseRenderer(answer())
    told = events(renderer.wait() + renderer.feed([(0, [failed()])]))
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in told] == kinds
    assert [event["sequence_number"] for event in told] == [0, 1, 2, 3]


def test_an_answer_is_bounded_since_its_end_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers, "DOCUMENT_BYTES_MAX", 1000)
    told = stream(ACCEPTED, delta("x" * 500), delta("x" * 600))
    assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
    with pytest.raises(RequestError, match="answer exceeds"):
        whole(ACCEPTED, delta("x" * 500), delta("x" * 600))


def test_it_is_kept_before_anybody_hears_that_it_is_over() -> None:
    kept: list[Any] = []
    renderer = ResponseSseRenderer(answer(kept=kept))
    renderer.feed([(0, [ACCEPTED, delta("a")])])
    assert kept == []
    [*_, last] = events(renderer.feed([(0, [finished()])]))
    assert kept == [last["response"]]


def test_a_response_that_is_cancelled_ends_with_what_it_has() -> None:
    kept: list[Any] = []
    one = answer(kept=kept)
    renderer = ResponseSseRenderer(one)
    renderer.feed([(0, [ACCEPTED, delta("a")])])
    assert one.so_far()["status"] == "in_progress"
    document = one.cancel()
    assert one.cancel() is document
    assert (document["status"], document["output"][0]["status"]) == ("cancelled", "incomplete")
    assert kept == [document]
    told = events(renderer.wait())
    assert renderer.over
    assert told[-1]["type"] == "response.incomplete"
    assert [event["sequence_number"] for event in told] == [5, 6, 7, 8]


def test_a_document_that_is_cancelled_comes_at_once() -> None:
    one = answer()
    renderer = ResponseDocumentRenderer(one)
    assert renderer.feed([(0, [ACCEPTED, delta("a")])]) == renderer.wait() == b""
    one.cancel()
    assert json.loads(renderer.feed([(0, [delta("b")])]))["output"][0]["content"][0]["text"] == "a"
    assert renderer.over


# --- stream and document agree, however chunked ------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Text of one channel."""

    channel: str
    text: str


pieces = st.lists(st.builds(Piece, st.sampled_from(["reasoning", "text", "call"]), st.text(min_size=1)))


@st.composite
def cut(draw: st.DrawFn) -> tuple[list[Piece], list[Delta]]:
    """Draw an answer and the deltas that carry it."""
    said = draw(pieces)
    steps: list[Delta] = []
    calls = 0
    for piece in said:
        ends = sorted(draw(st.sets(st.integers(1, len(piece.text)), max_size=3)) | {len(piece.text)})
        for begin, end in zip([0, *ends], ends, strict=False):
            text = piece.text[begin:end]
            match piece.channel:
                case "reasoning":
                    steps.append(delta(reasoning=text))
                case "text":
                    steps.append(delta(text))
                case _:
                    steps.append(delta(calls=(call(calls, "" if begin else "note", text),)))
        calls += piece.channel == "call"
    return said, _joined(draw, steps)


def _joined(draw: st.DrawFn, steps: list[Delta]) -> list[Delta]:
    """Merge some adjacent deltas, where the channel order within one delta keeps the text's order."""
    joined: list[Delta] = []
    for step in steps:
        last = joined[-1] if joined else delta()
        in_order = not (last.calls and (step.text or step.reasoning)) and not (last.text and step.reasoning)
        if joined and in_order and draw(st.booleans()):
            joined[-1] = delta(
                last.text + step.text,
                reasoning=last.reasoning + step.reasoning,
                calls=(*last.calls, *step.calls),
            )
        else:
            joined.append(step)
    return joined


def expected(said: list[Piece]) -> list[tuple[str, str]]:
    """Return the expected items: adjacent pieces of one channel form one item, except tool calls."""
    items: list[tuple[str, str]] = []
    kinds = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
    for piece in said:
        kind = kinds[piece.channel]
        if items and kind != "function_call" and items[-1][0] == kind:
            items[-1] = kind, items[-1][1] + piece.text
        else:
            items.append((kind, piece.text))
    return items or [("message", "")]


def text_of(item: dict[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            return str(item["arguments"])
        case "message":
            return str(item["content"][0]["text"])
        case _:
            return str((item.get("content") or item["summary"])[0]["text"])


@given(cut(), st.booleans(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_streamed_is_whole_however_it_is_cut(
    answered: tuple[list[Piece], list[Delta]], summarized: bool, reason: str
) -> None:
    said, steps = answered
    style = OutputStyle(summarized=summarized, sealed=True)
    told = stream(ACCEPTED, *steps, finished(reason=reason), style=style)
    document = told[-1]["response"]
    assert document == whole(ACCEPTED, *steps, finished(reason=reason), style=style)
    assert [(item["type"], text_of(item)) for item in document["output"]] == expected(said)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    joined: Counter[int] = Counter()
    texts = dict.fromkeys(range(len(document["output"])), "")
    for event in told[2:-1]:
        index = event["output_index"]
        assert index == max(joined, default=0) + (event["type"].endswith("item.added") and bool(joined))
        joined[index] += 1
        texts[index] += event.get("delta", "")
        if event["type"].endswith("item.done"):
            assert event["item"] == document["output"][index]
        if "item_id" in event:
            assert event["item_id"] == document["output"][index]["id"]
    assert list(texts.values()) == [text_of(item) for item in document["output"]]
