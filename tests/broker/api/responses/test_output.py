"""Rendering of responses: the events of a stream, and the document that ends it."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from broker.api.responses.answer import ResponseBuilder, ResponseDocumentRenderer, ResponseSseRenderer
from broker.api.responses.content import unseal
from broker.api.responses.items import messages
from broker.api.responses.output import OutputStyle, ResponseOutput
from broker.api.responses.tools import QualifiedName
from broker.dialects import renderers
from broker.dialects.custom import InputReader
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


def test_a_text_is_told_in_openais_order() -> None:
    told = stream(ACCEPTED, delta("all "), delta("aboard"), finished())
    assert [event["type"] for event in told] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[0]["response"]["status"] == told[1]["response"]["status"] == "in_progress"
    message = told[2]["item"]
    assert message == {
        "id": f"msg_{STEM}_0", "type": "message", "status": "in_progress", "role": "assistant",
        "content": [],
    }  # fmt: skip
    part = {"type": "output_text", "text": "all aboard", "annotations": [], "logprobs": []}
    assert told[7]["part"] == part
    assert told[8]["item"] == message | {"status": "completed", "content": [part]}
    assert told[9]["response"]["output"] == [told[8]["item"]]
    assert told[9]["response"]["completed_at"] == 99
    assert told[9]["response"]["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip


def test_thought_text_and_calls_are_items_one_after_another() -> None:
    first, rest = call(0, "note", '{"a"'), call(0, arguments=": 1}")
    steps = [
        delta(reasoning="hm"), delta("so", calls=(first,)), delta(calls=(rest, call(1, "files_note", "{}"))),
    ]  # fmt: skip
    style = OutputStyle(namespaces={"files_note": QualifiedName("files_", "note")})
    told = stream(ACCEPTED, *steps, finished(reason="tool_calls"), style=style)
    assert [event["type"].removeprefix("response.") for event in told[2:-1]] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    [thought, message, one, two] = told[-1]["response"]["output"]
    assert (thought["summary"], thought["content"]) == ([], [{"type": "reasoning_text", "text": "hm"}])
    assert "encrypted_content" not in thought
    assert message["content"][0]["text"] == "so"
    assert one == {
        "id": f"fc_{STEM}_2", "type": "function_call", "status": "completed", "call_id": "call_0",
        "name": "note", "arguments": '{"a": 1}',
    }  # fmt: skip
    assert (two["call_id"], two["arguments"]) == ("call_1", "{}")
    assert (two["namespace"], two["name"]) == ("files_", "note")


def test_reasoning_is_streamed_as_summary_when_summaries_are_requested() -> None:
    told = stream(ACCEPTED, delta(reasoning="hm"), finished(), style=OutputStyle(summarized=True))
    assert [event["type"].removeprefix("response.") for event in told[2:-1]] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    assert all(event["summary_index"] == 0 for event in told[3:-2])
    [thought] = told[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in thought


def test_likelihoods_stand_in_each_delta_and_in_the_part() -> None:
    likely = TokenLogprob(bytes=b"a", logprob=-0.5, top=[(b"b", -1.0)])
    told = stream(ACCEPTED, delta("", likely=(likely,)), delta("a", likely=(likely,)), finished())
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    entry["top_logprobs"] = [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    deltas = [event for event in told if event["type"].endswith("text.delta")]
    assert [(one["delta"], one["logprobs"]) for one in deltas] == [("", [entry]), ("a", [entry])]
    assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry, entry]


CALLED = ("function_call", "completed")
CUT = [delta(calls=(call(index, "note", written),)) for index, written in enumerate(('{"a": 1}', '{"a": 1'))]


@pytest.mark.parametrize(
    ("steps", "reason", "output"),
    [
        ([], "length", [("message", "incomplete")]),
        *(
            ([delta("a"), *CUT], reason, [("message", "completed"), CALLED, ("function_call", "incomplete")])
            for reason in ("length", "stop", "tool_calls")
        ),
    ],
)
def test_an_answer_that_is_cut_off_says_so(steps: list[Delta], reason: str, output: Any) -> None:
    told = stream(ACCEPTED, *steps, finished(reason=reason))
    assert told[-1]["type"] == "response.incomplete"
    document = told[-1]["response"]
    assert document["status"] == "incomplete"
    assert document["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["type"], item["status"]) for item in document["output"]] == output
    assert document == whole(ACCEPTED, *steps, finished(reason=reason))


def test_a_failure_is_a_status_code_and_within_a_stream_an_event_for_sdks_and_one_for_agents() -> None:
    for renderer in (ResponseSseRenderer(answer()), ResponseDocumentRenderer(answer())):
        with pytest.raises(RequestError, match="it broke"):
            renderer.feed([(0, [ACCEPTED, failed()])])
    renderer = ResponseSseRenderer(answer())  # which has sent a keepalive
    first, second, error, last = events(renderer.due() + renderer.feed([(0, [failed()])]))
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    told = {"code": "engine_error", "message": "it broke", "param": None}
    assert error == {"sequence_number": 2, "type": "error", **told, "error": {"type": "server_error", **told}}
    assert (last["type"], last["sequence_number"]) == ("response.failed", 3)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "engine_error", "message": "it broke"}


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
    told = events(renderer.due())
    assert renderer.over
    assert told[-1]["type"] == "response.incomplete"
    assert [event["sequence_number"] for event in told] == [5, 6, 7, 8]
    document = answer()
    whole_renderer = ResponseDocumentRenderer(document)
    assert whole_renderer.feed([(0, [ACCEPTED, delta("a")])]) == whole_renderer.due() == b""
    document.cancel()
    shown = json.loads(whole_renderer.feed([(0, [delta("b")])]))
    assert shown["output"][0]["content"][0]["text"] == "a"


TEXTS = st.text(max_size=4)
GROWTHS = st.lists(st.tuples(TEXTS, TEXTS, st.none() | st.tuples(TEXTS, TEXTS)), max_size=6)
"""Reasoning and text of each delta, and the arguments of the call that begins in it, in two parts."""


def expected(growths: list[Any]) -> list[tuple[str, str]]:
    """Return type and text of each item: neighbours of one channel form one, except tool calls."""
    items: list[tuple[str, str]] = []
    for reasoning, text, call in growths:
        for kind, more in (("reasoning", reasoning), ("message", text)):
            if more and items and items[-1][0] == kind:
                items[-1] = kind, items[-1][1] + more
            elif more:
                items.append((kind, more))
        if call is not None:
            items.append(("function_call", "".join(call)))
    return items or [("message", "")]


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return str((item.get("content") or item["summary"])[0]["text"])


@settings(max_examples=40)
@given(GROWTHS, st.booleans(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_streamed_is_whole_however_it_is_cut(growths: list[Any], summarized: bool, reason: str) -> None:
    steps: list[Item] = [ACCEPTED]
    for number, (reasoning, text, arguments) in enumerate(growths):
        begun = () if arguments is None else (call(number, "note", arguments[0]),)
        steps.append(delta(text, reasoning=reasoning, calls=begun))
        steps += [delta(calls=(call(number, arguments=arguments[1]),))] if arguments else []
    steps.append(finished(reason=reason))
    style = OutputStyle(summarized=summarized, sealed=True)
    told = stream(*steps, style=style)
    document = told[-1]["response"]
    assert document == whole(*steps, style=style)
    assert [(item["type"], text_of(item)) for item in document["output"]] == expected(growths)
    thoughts = [item for item in document["output"] if item["type"] == "reasoning"]
    assert [unseal(item["encrypted_content"]) for item in thoughts] == [*map(text_of, thoughts)]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    texts, current = dict.fromkeys(range(len(document["output"])), ""), -1
    for event in told[2:-1]:
        current += event["type"].endswith("item.added")
        assert event["output_index"] == current
        texts[current] += event.get("delta", "")
        if event["type"].endswith("item.done"):
            assert event["item"] == document["output"][current]
        if "item_id" in event:
            assert event["item_id"] == document["output"][current]["id"]
    assert list(texts.values()) == [text_of(item) for item in document["output"]]


RUN = {"command": ["ls", "-l"], "timeout_ms": 5}
ENV = {"env": {"a": "b"}}
PATCH = {"type": "update_file", "path": "a", "diff": "@@\n-b"}
INPUTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(place % (len(text) + 1) for place in places), None])]


def read(pieces: list[str]) -> tuple[str, str]:
    """Return the input streamed so far, and the rest at the end."""
    reader = InputReader()
    told = "".join(reader.push(piece) for piece in pieces)
    rest = reader.close()
    assert reader.text == told + rest
    return told, rest


@pytest.mark.parametrize(
    ("arguments", "told", "rest"),
    [
        (r'{"input":"\ud83d\ude82 \\ud83d \"\u00e9\/"}', '🚂 \\ud83d "é/', ""),
        (r'{"input":"a\ud83d"}', "a?", ""),  # half a surrogate pair is not a character
        (r'{"input":"\ud83d\u0041"}', "?A", ""),
        ('{"patch":"*** Begin"}', "", "*** Begin"),
        ('{"input":5}', "", '{"input":5}'),
        (r'{"input":"ab\u00e', "ab", ""),
        ("{}", "", ""),
        ('{"inp', "", '{"inp'),
        ("", "", ""),
    ],
)
def test_other_arguments_are_told_in_the_end(arguments: str, told: str, rest: str) -> None:
    assert read([arguments]) == (told, rest)
    assert read(list(arguments)) == (told, rest)


@settings(max_examples=50)
@given(text=INPUTS, places=st.lists(st.integers(0, 400), max_size=6), is_ascii=st.booleans())
def test_a_call_streamed_is_the_call_whole(text: str, places: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read(cut(arguments, places)) == (text, "")
    output = ResponseOutput(
        STEM, OutputStyle(customs=frozenset({"patch"}), namespaces={"patch": ("files", "patch")})
    )
    calls = [CallDelta(index=0, id="call_1", name="patch")]
    calls += [CallDelta(index=0, arguments=piece) for piece in cut(arguments, places)]
    deltas = [delta(calls=(each,)) for each in calls]
    events = [event for delta in deltas for event in output.take(delta)] + list(output.close(complete=True))
    (item,) = output.items
    assert item == {
        "id": f"ctc_{STEM}_0", "type": "custom_tool_call", "status": "completed", "call_id": "call_1",
        "name": "patch", "namespace": "files", "input": text,
    }  # fmt: skip
    kinds = [event["type"].removeprefix("response.") for event in events]
    grown = [event["delta"] for event in events if "delta" in event]
    assert "".join(grown) == text
    middle = ["custom_tool_call_input.delta"] * len(grown)
    end = ["custom_tool_call_input.done", "output_item.done"]
    assert kinds == ["output_item.added", *middle, *end]
    assert events[0]["item"]["input"] == ""
    assert events[-2]["input"] == text


@pytest.mark.parametrize(
    ("name", "arguments", "status", "shown"),
    [
        ("tool_search", {"query": "a"}, "completed", {"execution": "client", "arguments": {"query": "a"}}),
        ("tool_search", '{"que', "incomplete", {"execution": "client", "arguments": {}}),
        ("local_shell", RUN, "completed", {"action": {"type": "exec", "env": {}, **RUN}}),
        ("local_shell", RUN | ENV, "completed", {"action": {"type": "exec", **ENV, **RUN}}),
        ("shell", {"commands": ["ls"]}, "completed", {"action": {"commands": ["ls"]}}),
        ("shell", '{"commands": ["ls"', "incomplete", {"action": {}}),
        ("apply_patch", PATCH, "completed", {"operation": PATCH}),
    ],
)  # fmt: skip
def test_a_call_of_a_builtin_tool_is_an_item_of_its_own(
    name: str, arguments: Any, status: str, shown: dict[str, Any]
) -> None:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    steps = [ACCEPTED, delta(calls=(call(0, name, written[:4]),))]
    steps += [delta(calls=(call(0, arguments=written[4:]),)), finished(reason="tool_calls")]
    style = OutputStyle(builtins=frozenset({name}))
    [_, _, added, done, ended] = stream(*steps, style=style)
    [item] = ended["response"]["output"]
    assert done["item"] == item == whole(*steps, style=style)["output"][0]
    head = {"type": f"{name}_call", "call_id": "call_0", "status": status}
    assert item == {"id": item["id"], **head, **shown}
    assert added["item"].keys() == item.keys()
    if status == "completed":
        TypeAdapter(ResponseOutputItem).validate_python(item)
        [said] = messages([("", item)])
        assert said["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
