"""Calls of families for which upstream has no parser, and what models botch within tags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.output.calls.parsed_answers import either_way

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": STRING, "days": INTEGER}},
    "write_file": {"properties": {"path": STRING, "content": STRING}},
    "list_all": {},
}
QUITO = ("get_weather", {"city": "Quito"})
BOTH = [QUITO, ("list_all", {})]

CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
OBJECT = '{"name": "get_weather", "arguments": {"city": "Quito"}}'
OTHER = '{"name": "list_all", "arguments": {}}'
DSML = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n'
DSML_CITY = '<｜DSML｜parameter name="city" string="true">Quito</｜DSML｜parameter>\n'


def r1(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


def dsml(section: str) -> str:
    calls = DSML.format("get_weather", DSML_CITY) + DSML.format("list_all", "")
    return f"<｜DSML｜{section}>\n{calls}</｜DSML｜{section}>"


FORMATS = {
    "DeepSeek R1": CALLS + r1("get_weather", '{"city": "Quito"}') + "\n" + r1("list_all", "{}") + CALLS_END,
    "DeepSeek V3.1": CALLS + v3("get_weather", '{"city": "Quito"}') + v3("list_all", "{}") + CALLS_END,
    "DeepSeek, without a section": v3("get_weather", '{"city": "Quito"}') + v3("list_all", "{}"),
    "DeepSeek V3.2": dsml("function_calls"),
    "DeepSeek V4": dsml("tool_calls"),
    "MiniMax M3": '<tool_call>\n<invoke name="get_weather">\n<city>Quito</city>\n</invoke>\n'
    '<invoke name="list_all">\n</invoke>\n</tool_call>',
    "Seed-OSS": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Quito</parameter>\n</function>\n"
    "<function=list_all>\n</function>\n</seed:tool_call>",
    "Command": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "Quito"}}, {"tool_call_id": "1", "tool_name": "list_all", "parameters": {}}]<|END_ACTION|>',
    "Granite 3, Phi-4-mini": f"<|tool_call|>[{OBJECT}, {OTHER}]<|/tool_call|>",
    "Nemotron": f"<TOOLCALL>[{OBJECT}, {OTHER}]</TOOLCALL>",
    "Llama 4": '[get_weather(city="Quito"), list_all()]',
    "OLMo 3": '<function_calls>\nget_weather(city="Quito")\nlist_all()\n</function_calls>',
    "xLAM": f"[{OBJECT}, {OTHER}]",
    "Llama 3": f"<|python_tag|>{OBJECT}; {OTHER}",
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_calls_of_a_family_are_read_wherever_they_are_cut(text: str) -> None:
    said = either_way(TOOLS, text)
    assert (said.parsed(), said.text, said.whole) == (BOTH, "", [0, 1])
    before = "" if text.startswith("[") else "I look.\n"  # a bare list is a call at the beginning alone
    said = either_way(TOOLS, before + text)
    assert (said.parsed(), said.text) == (BOTH, before)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[link](https://example.com)",
        '[{"name": "nobody"}]',
        "[get_weather] is what you want",
        "<｜tool▁call▁begin｜>nobody",
        "to=functions.get_weather",  # harmony's, whose models alone write it
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    said = either_way(TOOLS, text, has_ended=True)
    assert (said.text, said.calls) == (text, [])


CODE = "    if x:\n        return 1\n"
VALUES = {
    "GLM": "<tool_call>write_file<arg_key>content</arg_key><arg_value>{}</arg_value></tool_call>",
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="write_file">\n'
    '<parameter name="content">{}</parameter>\n</invoke>\n</minimax:tool_call>',
    "MiniCPM5": '<function name="write_file"><param name="content">{}</param></function>',
    "Qwen": "<tool_call>\n<function=write_file>\n"
    "<parameter=content>\n{}\n</parameter>\n</function>\n</tool_call>",
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter '
    'name="content" string="true">{}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
}


@pytest.mark.parametrize("written", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("value", [CODE, "\n\n", "\t", "", " a ", "\r\nline\r\n"])
def test_a_string_is_kept_to_the_byte(written: str, value: str) -> None:
    said = either_way(TOOLS, written.format(value))
    assert (said.parsed(), said.text) == ([("write_file", {"content": value})], "")


QWEN = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n{}</function>\n</tool_call>"
)
NESTED = "<conf>\n<parameter=city>\nRome\n</parameter>\n</conf>"


@pytest.mark.parametrize(
    ("inner", "content"),
    [
        ("<parameter=content>\nAn </parameter> within.\n</parameter>\n", "An </parameter> within."),
        (f"<parameter=content>\n{NESTED}\n</parameter>\n", NESTED),
        ("</parameter>\n<parameter=content>\nhi\n</parameter>\n", "hi"),
        ("<parameter=content>\nhi\n</parameter>\n</parameter>\n", "hi"),
        ('<parameter name="content">\nhi\n</parameter>\n', "hi"),
    ],
)
def test_inner_tags_are_forgiven_as_outer_ones_are(inner: str, content: str) -> None:
    said = either_way(TOOLS, QWEN.format(inner))
    assert (said.parsed(), said.text) == ([("write_file", {"path": "a.txt", "content": content})], "")


@pytest.mark.parametrize(
    "text",
    [
        '<|python_tag|>get_weather.call(city="Quito")',  # a built-in call of Llama 3
        # An opening tag twice.
        "<function=get_weather>\n<function=get_weather>\n<parameter=city>\nQuito\n</parameter>\n</function>",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<invoke name="get_weather">\n'
        '<parameter name="city">Quito</parameter>\n</invoke>\n</minimax:tool_call>',
    ],
)
def test_text_is_one_call(text: str) -> None:
    said = either_way(TOOLS, text)
    assert (said.parsed(), said.text, said.whole) == ([QUITO], "", [0])


CITED = "<function=get_weather><parameter=city>Quito</parameter></function>"


@pytest.mark.parametrize(
    "text",
    [
        f"Write `{CITED}` to know.",
        f"A call looks so:\n\n```xml\n{CITED}\n```\n\nShall I?",
        f"`{CITED}`",
        f"```\n`\n{CITED}\n```",
    ],
)
def test_a_call_within_code_is_text(text: str) -> None:
    said = either_way(TOOLS, text)
    assert (said.text, said.calls) == (text, [])


@pytest.mark.parametrize("before", ["Write `it`: ", "```\na fence\n```\n", "a ` b\n"])
def test_a_call_behind_code_is_a_call(before: str) -> None:
    said = either_way(TOOLS, before + CITED)
    assert (said.text.strip(), said.parsed()) == (before.strip(), [QUITO])
