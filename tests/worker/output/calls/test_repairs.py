"""Calls that models botch: in quotes and commas, in their markers, and at their ends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.worker.output.calls.parsed_answers import ParsedAnswer, either_way, in_pieces, only_call
from tests.worker.output.calls.test_formats import THOUGHTS, check_unfinished, cuts_of
from tests.worker.output.calls.written import WORDS, nested, texts
from worker.output.calls.formats import READERS
from worker.output.calls.literals import LOOSE_JSON, transcode
from worker.output.calls.parser import REPEATS_MAX, closing_of
from worker.output.calls.source import CLOSINGS

TOOLS: dict[str, Any] = {"get": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
OBJECT = '{"name": "get", "arguments": {"city": "Quito"}}'
FUNCTION = "<function=get>\n<parameter=city>\nQuito\n</parameter>\n</function>"


def said(text: str, *, has_ended: bool = True) -> ParsedAnswer:
    return either_way(TOOLS, text, has_ended=has_ended)


def called(text: str) -> Any:
    return only_call(said(text))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get", "arguments": {"city": "Quito",}}</tool_call>',
        "<tool_call>{'name': 'get', 'arguments': {'city': 'Quito'}}</tool_call>",
        """<tool_call>{"name": "get", "arguments": "{'city': 'Quito'}"}</tool_call>""",
        '<tool_call>{"name": "get", "input": {"city": "Quito"}}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "get", "arguments": {"city": "Quito"}}}',
        '<tool_call>{{"name": "get", "arguments": {"city": "Quito"}}}</tool_call>',
        "[TOOL_CALLS]get[ARGS]{'city': 'Quito'}",
        # Markers that are too many are no text.
        f"{FUNCTION}\n</tool_call>",
        f"<tool_call>{OBJECT}}}</tool_call>",
        f"<tool_call>\n<tool_call>\n{OBJECT}\n</tool_call>\n</tool_call>",
        f"<tool_call>\n```json\n{OBJECT}\n```\n</tool_call>",
        f"<tools>\n{OBJECT}\n</tools>",
        '<function_calls><invoke name="get"><parameter name="city">Quito</parameter>'
        "</invoke></function_calls>",
        f"{OBJECT}</tool_call>",
    ],
)
def test_call_that_is_nearly_right_is_read(text: str) -> None:
    assert called(text) == {"city": "Quito"}


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (r'"C:\dir"', "C:\\dir"),
        (r'"\d+ \"x\""', '\\d+ "x"'),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ("True", True),
        ("[1, 2, ]", [1, 2]),
    ],
)
def test_values_that_are_nearly_json_are_read(value: str, read: object) -> None:
    text = f'<tool_call>{{"name": "get", "arguments": {{"city": {value}}}}}</tool_call>'
    assert called(text) == {"city": read}


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{OBJECT[:-2]}</tool_call>",
        f"<tool_call>{OBJECT[:-2]}\n</function>\n</tool_call>",
        FUNCTION.replace("</function>", "</tool_call>"),
        "<tool_call>\nget\n<arg_key>city</arg_key>\n<arg_value>Quito</arg_value></function>",
    ],
)
def test_a_call_that_only_lacks_a_closing_is_complete_when_another_one_comes(text: str) -> None:
    assert called(text) == {"city": "Quito"}
    assert said(text, has_ended=False) == said(text)


UNCLOSED = [
    f"<tool_call>{OBJECT[:-2]}\n",
    FUNCTION.removesuffix("</function>"),
    "<tool_call>\nget\n<arg_key>city</arg_key>\n<arg_value>Quito</arg_value>\n",
    "<|tool_call_start|>[get(city='Quito'",
    '[TOOL_CALLS]get[ARGS]{"city": "Quito"',
]


@pytest.mark.parametrize("text", UNCLOSED)
def test_a_call_that_only_lacks_its_closing_is_complete_only_if_the_model_has_ended_it(text: str) -> None:
    assert called(text) == {"city": "Quito"}
    result = said(text, has_ended=False)
    assert (len(result.calls), result.whole) == (1, [])
    check_unfinished(result)


@pytest.mark.parametrize("text", [*UNCLOSED, f"<tool_call>{OBJECT[:-2]}</tool_call>"])
@pytest.mark.parametrize(
    "schema",
    [{"required": ["city", "days"]}, {"properties": {"city": {"type": "array"}}}, {"required": ["x"]}],
)
def test_an_unclosed_call_that_its_schema_refuses_is_not_complete(text: str, schema: dict[str, Any]) -> None:
    result = in_pieces({"get": schema}, [text], has_ended=True)
    assert (len(result.calls), result.whole) == (1, [])


def test_whatever_a_model_has_closed_is_a_call_whose_client_judges_its_arguments() -> None:
    result = in_pieces({"get": {"required": ["days"]}}, [f"<tool_call>{OBJECT}</tool_call>"], has_ended=True)
    assert (result.parsed(), result.whole) == ([("get", {"city": "Quito"})], [0])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get", "arguments": {"city": "Qui',
        '<tool_call>{"name": "get", "arguments": {"days": 12',
        "<function=get>\n<parameter=city>\nQuito",
        "<function=get>\n<parameter=city>\nQuito\n</function>\n</tool_call>",
    ],
)
def test_no_value_is_ever_completed_or_shortened(text: str) -> None:
    result = said(text)
    assert (len(result.calls), result.whole) == (1, [])
    check_unfinished(result)


@pytest.mark.parametrize(
    "text",
    [
        "</tool_call>",
        "<tool_call>" * (REPEATS_MAX + 3) + "{}",
        f"```json\n{OBJECT}\n```",
        '{"name": "get", "input": {}}',
        "{'name': 'get', 'arguments': {}}",
    ],
)
def test_text_without_a_call_is_never_eaten(text: str) -> None:
    result = said(text)
    assert (result.text, result.calls) == (text, [])


def test_text_and_calls_behind_a_call_are_kept() -> None:
    result = said(f"<tool_call>{OBJECT}</tool_call></tool_call>\nDone}} </tool_call>")
    assert (result.text, result.whole) == ("\nDone} </tool_call>", [0])
    result = said(f"<tool_call>{OBJECT}}}]")
    assert (result.text, result.whole) == ("}]", [0])
    result = said(f"<tool_call>{OBJECT[:-1]}</tool_call>\n<tool_call>{OBJECT}</tool_call>")
    assert (result.text, result.whole) == ("", [0, 1])


layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@given(nested, layouts)
@settings(max_examples=60)
def test_valid_json_is_never_changed(value: object, layout: dict[str, Any]) -> None:
    text = json.dumps(value, **layout)
    assert transcode(text, LOOSE_JSON) == text.strip()


@given(st.dictionaries(texts, nested, max_size=3), st.data())
@settings(max_examples=60)
def test_brackets_complete_json_only_between_its_values(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    start = text[: data.draw(st.integers(1, len(text)))]
    closing = closing_of(start)
    if closing is not None:
        assert re.fullmatch(r"[}\]]*", closing)
        json.loads(start + closing)
    assert closing_of(text) == ""


PIECES = [*READERS, *CLOSINGS, OBJECT, FUNCTION, *OBJECT, *OBJECT, "'", ",}", "\\", "get", "```json", *WORDS]
botched = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@given(botched, st.booleans(), st.data())
@settings(max_examples=100)
def test_any_text_gives_the_same_however_it_is_cut(text: str, has_ended: bool, data: st.DataObject) -> None:
    assume(not text.lstrip().startswith(THOUGHTS))
    whole = in_pieces(TOOLS, [text], has_ended=has_ended)
    assert in_pieces(TOOLS, text, has_ended=has_ended) == whole
    assert in_pieces(TOOLS, cuts_of(data.draw, text), has_ended=has_ended) == whole
    check_unfinished(whole)
    rest = iter(text)
    assert all(character in rest for character in whole.text)
    if has_ended and not whole.calls:
        assert whole.text == text
