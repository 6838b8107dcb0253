"""The tool-call parser case by case, beyond the properties of the formats."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.factories import engine_request
from tests.worker.output.calls.parsed_answers import (
    ParsedAnswer,
    either_way,
    in_pieces,
    model,
    named,
    only_call,
)
from worker.output.calls.formats import UNDECIDED_CHARACTERS_MAX
from worker.output.calls.tagged import HEAD_CHARACTERS_MAX
from worker.output.calls.writer import CallNumbering, namer_of
from worker.output.channels import CONTENT
from worker.values import SamplingParams

TOOLS: dict[str, Any] = {
    "get": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}},
    "get_weather": {},
}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Quito"}}\n</tool_call>'


def said(text: str, tools: dict[str, Any] = TOOLS) -> ParsedAnswer:
    return either_way(tools, text)


def called(text: str) -> Any:
    return only_call(said(text))


def is_text(text: str) -> bool:
    result = said(text)
    return (result.text, result.calls) == (text, [])


def test_the_name_goes_out_first_and_arguments_as_they_come() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"city": "Quito"}}'
    growing = [in_pieces(TOOLS, [text[:place]]).calls for place in range(len(text) + 1)]
    named = text.index('get"') + 4
    assert growing[named - 1] == []
    assert growing[named] == [("call-0", "get", "")]
    assert growing[text.index("uito")][0][2] == '{"city": "Q'
    assert growing[-2][0][2] == '{"city": "Quito"'
    assert growing[-1][0][2] == '{"city": "Quito"}'


def test_strings_between_tags_stream_and_other_values_come_whole() -> None:
    city, days = "<parameter=city>\nQuito\n</parameter>", "<parameter=days>\n12\n</parameter>"
    text = f"<function=get>\n{city}\n{days}\n</function>"
    growing = ["".join(c[2] for c in in_pieces(TOOLS, [text[:p]]).calls) for p in range(len(text) + 1)]
    assert growing[text.index("uito")] == '{"city": "Q'
    assert growing[text.index("2\n")] == '{"city": "Quito", "days": '
    assert growing[-1] == '{"city": "Quito", "days": 12}'


@pytest.mark.parametrize(
    "text",
    [
        *(f"{text} and so on" for text in ("a < b", "x = [TOOL", "<tool", "f(x)", "call: me")),
        *('<tool_call>{"name": "x', "<function=x", "<tool_call>gex", "<|tool_call>call:x"),  # no such names
        *("[f(", "[TOOL_CALLS]f[CALL_ID]", "<tool_call>f{", "<function=f>", '<invoke name="f">'),
    ],
)
def test_ordinary_text_waits_for_nothing_but_possible_markers_and_names(text: str) -> None:
    reading = model().form.open(CONTENT, CallNumbering(TOOLS, named, single=False))
    assert "".join(str(grown) for _, grown in reading.split(text)) == text


def test_a_list_of_objects_is_no_code_wherever_it_is_cut() -> None:
    cut = in_pieces(TOOLS, ['[TOOL_CALLS] [{"name": "get", "arguments": {"f('], only=True)
    assert cut.calls == [("call-0", "get", "{")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"city": "Quito"}}</tool_call>',
        "<tool_call>get well soon</tool_call>",
        "<tool_call>\n<function=nobody>\n</function>\n</tool_call>",
        "[TOOL_CALLS]nobody[ARGS]{}",
        "<|tool_call_start|>[get('Quito')]<|tool_call_end|>",
        '{"name": "get"}',
        '{"name": "nobody", "arguments": {}}',
        'Sure: {"name": "get", "arguments": {}}',
        "{",
        '{"report": {"name": "get", "arguments": {}}}',
        "<function=" + "g" * HEAD_CHARACTERS_MAX + ">",
    ],
)
def test_text_without_a_valid_tool_call_stays_text(text: str) -> None:
    assert is_text(text)


def test_without_its_name_an_object_is_waited_for_only_so_long() -> None:
    def text(size: int) -> str:
        return f'<tool_call>{{"arguments": {{"city": "{"x" * size}"}}, "name": "get"}}</tool_call>'

    assert called(text(UNDECIDED_CHARACTERS_MAX // 2)) == {"city": "x" * (UNDECIDED_CHARACTERS_MAX // 2)}
    assert is_text(text(UNDECIDED_CHARACTERS_MAX))


def test_a_marker_within_what_was_no_call_is_one() -> None:
    result = said(f"<function= {CALL}")
    assert (result.text, len(result.whole)) == ("<function= ", 1)
    result = said(f'<tool_call>{{"name": "no{CALL}')
    assert (result.text, len(result.whole)) == ('<tool_call>{"name": "no', 1)
    result = said(f'<tool_call>{{"name": "get", "arguments": {{"a": ?{CALL}')  # behind one that broke
    assert (result.text, result.whole) == ("?", [1])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "get", "arguments": {"a": tru!}}', '{"a": ', "tru!}}"),
        ('<tool_call>{"name": "get", "argument": {"a": 1}}', "", ', "argument": {"a": 1}}'),
        ("<function=get>\n<parameter=city>\nQuito", '{"city": "Quito', ""),
        ("<function=get>\n<parameter=city>\nQ\n</parameter>\nBye", '{"city": "Q\\n</parameter>\\nBye', ""),
        ("<tool_call>get\n<arg_key>city</arg_key>\nQuito", "", "<arg_key>city</arg_key>\nQuito"),
        ("[TOOL_CALLS]get[ARGS]{(a): 1}", "{", "(a): 1}"),
    ],
)
def test_a_call_that_breaks_stays_unfinished_before_text(text: str, arguments: str, content: str) -> None:
    result = said(text)
    assert (result.calls, result.whole) == ([("call-0", "get", arguments)], [])
    assert result.text == content


# --- calls in other formats than the model's -------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get", "arguments": {"city": "Quito"}}',
        '<tool_call>{"name": "get", "parameters": {"city": "Quito"}}</tool_call>',
        '<tool_call>{"arguments": {"city": "Quito"}, "name": "get"}</tool_call>',
        '<tool_call>{"type": "function", "name": "g\\u0065t", "id": "x", "arguments": {"city": "Quito"}}',
        '<tool_call>get{"city": "Quito"}</tool_call>',
        '<tool_call><function name="get"><param name="city">Quito</param></function></tool_call>',
        "<function=get><parameter=city>Quito</parameter></function></tool_call>",
        '<function=get>{"city": "Quito"}</function>',
        '<invoke name="get"><parameter name="city">Quito</parameter></invoke>',
        '[TOOL_CALLS]get[CALL_ID]abcdefgh0[ARGS]{"city": "Quito"}',
        '{"name": "get", "parameters": {"city": "Quito"}}',
        ' \n{"type": "function", "name": "get", "arguments": {"city": "Quito"}}\n',
        '<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"city": "Quito"}<|tool_call_end|>',
    ],
)
def test_the_forms_that_models_fall_back_to_are_understood(text: str) -> None:
    assert called(text) == {"city": "Quito"}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get"}</tool_call>',
        '<tool_call>{"name": "get", "arguments": null}</tool_call>',
        "<tool_call>\n<function=get>\n</function>\n</tool_call>",
        "<|tool_call_start|>[get()]<|tool_call_end|>",
        "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|><|tool_call_end|>",
    ],
)
def test_a_call_may_have_no_arguments(text: str) -> None:
    assert called(text) == {}


def test_a_models_own_ids_are_kept_where_its_template_needs_them() -> None:
    def call(id: str) -> str:
        return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"

    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    result = said(section.format(call("functions.get:0") + call("functions.get:1") + call("functions.get:1")))
    assert [id for id, _, _ in result.calls] == ["functions.get:0", "functions.get:1", "call-2"]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [  # Upstream's parsers read other values of these, or fail.
        ("<function=get><parameter=a>null</parameter></function>", "string", "null"),
        ('<invoke name="get"><parameter name="a">5</parameter></invoke>', "string", "5"),
        ("<function=get><parameter=a>yes</parameter></function>", "boolean", True),
        ("<function=get><parameter=a>9007199254740993</parameter></function>", "integer", 9007199254740993),
        ("<start_function_call>call:get{a:<escape>x}y<escape>}", "integer", "x}y"),
        ('<minimax:tool_call><invoke name="get"><parameter name="a">x</invoke>y</parameter></invoke>',
         "integer", "x</invoke>y"),
        ("<function=get><parameter=a>1.5x</parameter></function>", "integer", "1.5x"),
    ],
)  # fmt: skip
def test_values_stay_whole_and_what_their_schema_calls_them(text: str, kind: str, value: Any) -> None:
    result = said(text, {"get": {"properties": {"a": {"type": kind}}}})
    assert json.loads(result.calls[0][2]) == {"a": value}


def test_ids_belong_to_the_prompt_the_seed_and_the_place_wherever_a_stream_resumes() -> None:
    own = engine_request("a", (5, 6), sampling=SamplingParams(seed=2**63 - 1))
    others = [replace(own, tokens=(5, 6, 7)), replace(own, sampling=SamplingParams(seed=3))]
    ids = [namer_of(each)(index) for each in (own, *others) for index in range(3)]
    assert len({*ids}) == 9
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert namer_of(replace(own, id="a~2", resume=(9,)))(1) == ids[1]
