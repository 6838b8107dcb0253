"""`events.js`, `chat.js` and `settings.js`: requests of the playground, and its view of answers."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.chat import body as chat_body
from tests.broker.page.scripts import ASSETS, Call

USER = {"role": "user", "text": "hello", "images": []}
EMPTY = {
    "role": "assistant", "id": "", "model": "", "text": "", "thought": "", "calls": [], "finish": None,
    "usage": None,
}  # fmt: skip
EMPTY |= {"problem": "", "askedAt": 10.0, "firstAt": None, "answerAt": None, "endedAt": None}


def answer(**told: Any) -> dict[str, Any]:
    return EMPTY | told


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def grown(call: Call, *chunks: dict[str, Any]) -> Any:
    grows: Any = answer()
    for number, each in enumerate(chunks, 1):
        grows = call("chat.js", "grown", grows, each, 10.0 + number)
    return grows


EVENTS = st.lists(
    st.tuples(st.sampled_from(["message", "status"]), st.text("ab🚂 {:", min_size=1)), max_size=5
)


@settings(max_examples=40)
@given(events=EVENTS, cuts=st.lists(st.integers(0, 200), max_size=6), ends=st.sampled_from(["\n", "\r\n"]))
def test_events_are_read_however_they_were_cut(call: Call, events: Any, cuts: list[int], ends: str) -> None:
    written = "".join(f"event: {name}\ndata: {data}\n\n: still here\n\n" for name, data in events)
    written = written.replace("\n", ends)
    inner = [cut for cut in cuts if cut < len(written) and written[cut - 1] != "\r"]
    places = sorted({0, len(written), *inner})
    rest, found = "", []
    for start, stop in itertools.pairwise(places):
        told = call("events.js", "read", rest, written[start:stop])
        rest = told["rest"]
        found += [(event["event"], event["data"]) for event in told["events"]]
    assert found == events
    assert rest == ""


# --- streamed answers ---


def test_an_answer_grows_by_what_its_chunks_say(call: Call) -> None:
    usage = {"completion_tokens": 3}
    told = grown(
        call,
        chunk(role="assistant", content=""),
        chunk(reasoning_content="Hm", reasoning="Hm"),
        chunk(content="Hel"),
        chunk(content="lo", finish="stop"),
        {"id": "chatcmpl-1", "choices": [], "usage": usage},
    )
    assert (told["thought"], told["text"], told["finish"], told["usage"]) == ("Hm", "Hello", "stop", usage)
    assert (told["id"], told["firstAt"], told["answerAt"]) == ("chatcmpl-1", 12.0, 13.0)
    broken = grown(call, chunk(content="Hel"), {"error": {"message": "It broke.", "code": "engine_error"}})
    assert (broken["text"], broken["problem"]) == ("Hel", "It broke.")


def test_calls_are_put_together_each_by_its_place(call: Call) -> None:
    def gain(index: int, text: str, name: str | None = None, **head: str) -> dict[str, Any]:
        return head | {"index": index, "function": {"arguments": text} | ({"name": name} if name else {})}

    told = grown(
        call,
        chunk(tool_calls=[gain(0, "", "note", id="a")]),
        chunk(tool_calls=[gain(0, '{"x":'), gain(1, "{}", "other", id="b")]),
        chunk(tool_calls=[gain(0, "1}")], finish="tool_calls"),
    )
    assert told["calls"] == [
        {"id": "a", "name": "note", "arguments": '{"x":1}'},
        {"id": "b", "name": "other", "arguments": "{}"},
    ]


# --- requests ---


def test_turns_are_messages(call: Call) -> None:
    calls = [{"id": "c1", "name": "note", "arguments": "{}"}]
    url = "data:image/png;base64,AAAA"
    turns = [
        USER | {"images": [url]},
        answer(problem="an answer that never was"),
        answer(text="Hm", calls=calls),
        {"role": "tool", "call": "c1", "name": "note", "text": "done"},
    ]
    function = {"name": "note", "arguments": "{}"}
    image = {"type": "image_url", "image_url": {"url": url}}
    assert call("chat.js", "messages", turns, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "hello"}]},
        {
            "role": "assistant", "content": "Hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]  # fmt: skip
    assert [left["id"] for left in call("chat.js", "unanswered", turns[:3])] == ["c1"]
    assert call("chat.js", "unanswered", turns) == []


def test_a_question_goes_with_all_that_followed_it_and_the_others_keep_their_numbers(call: Call) -> None:
    tool = {"role": "tool", "call": "c", "name": "note", "text": "done"}
    turns = [USER, answer(), tool, answer(text="b"), USER, answer(text="c")]
    assert call("chat.js", "without", turns, 0) == turns[4:]
    assert call("chat.js", "without", turns, 4) == turns[:4]
    assert call("chat.js", "before", turns) == turns[:5]
    assert call("chat.js", "edited", turns, 0, "other") == [USER | {"text": "other"}]
    numbered = call("chat.js", "added", [USER | {"number": 3}], USER)
    assert [turn["number"] for turn in numbered] == [3, 4]


def test_a_stopped_answer_gets_its_figures_from_the_status(call: Call) -> None:
    end = {"id": "chatcmpl-1", "prompt_tokens": 9, "answered": 5, "cached_tokens": 4}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    stopped = answer(id="chatcmpl-1", text="a", finish="stopped", endedAt=12.0)
    assert call("chat.js", "withUsage", [USER, stopped], [end])[1] == stopped | {"usage": usage}
    for other in (stopped | {"endedAt": None}, stopped | {"usage": {}}, stopped | {"id": "chatcmpl-2"}):
        assert call("chat.js", "withUsage", [USER, other], [end]) == [USER, other]


def test_sentences_are_read_aloud_when_they_are_whole(call: Call) -> None:
    for text, whole in (("One. Two", "One."), ("3.14 is", ""), ("はい。そう", "はい。"), ("a\nb", "a\n")):
        assert text[: call("chat.js", "sayable", text)] == whole


# --- settings ---


def test_fields_are_parameters_of_the_api_unless_they_are_empty(call: Call) -> None:
    empty = dict.fromkeys(("temperature", "stop", "enable_thinking", "response_format"), "")
    empty |= {"system": "Be brief.", "tools": " ", "tool_choice": "required"}
    assert call("settings.js", "parameters", empty) == {"parameters": {}, "problem": ""}
    assert call("settings.js", "chosen", empty) == 1
    schema = {"type": "object"}
    fields = {
        "temperature": "0", "max_tokens": "12", "stop": "a\n\nb", "enable_thinking": "false",
        "response_format": "json_schema",
    }  # fmt: skip
    fields |= {"schema": json.dumps(schema), "tools": '[{"name": "note"}]', "tool_choice": "required"}
    told = call("settings.js", "parameters", fields)["parameters"]
    assert told == {
        "temperature": 0, "max_tokens": 12, "stop": ["a", "b"], "enable_thinking": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "note"}}], "tool_choice": "required",
    }  # fmt: skip
    chat_body.read(json.dumps(told | {"messages": [{"role": "user", "content": "x"}]}).encode())


def test_invalid_settings_are_explained(call: Call) -> None:
    for fields, beginning in (
        ({"tools": "[{"}, "tools must be JSON: "),
        ({"response_format": "json_schema", "schema": ""}, "schema must be JSON: "),
        ({"temperature": "warm"}, "temperature must be a number."),
    ):
        told = call("settings.js", "parameters", fields)
        assert told["problem"].startswith(beginning)
        assert told["parameters"] == {}


def test_every_field_of_the_form_is_understood(call: Call) -> None:
    text = (ASSETS / "index.html").read_text(encoding="utf-8")
    form = text[text.index('id="settings-form"') : text.index("</form>")]
    names = set(re.findall(r'name="(\w+)"', form))
    values = dict.fromkeys(names, "1") | {
        "response_format": "json_schema", "schema": "{}", "tools": "[{}]", "enable_thinking": "true",
    }  # fmt: skip
    asked = set(call("settings.js", "parameters", values)["parameters"])
    assert names - {"schema"} == asked
    labels = set(re.findall(r"<label[^>]*><code>(\w+)</code>", form))
    assert labels == names, "a label is not the API's name"
