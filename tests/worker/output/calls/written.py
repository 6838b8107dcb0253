"""Call formats: how each is written, which values it can carry, and what upstream's parser reads."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

from hypothesis import strategies as st

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

NAMES = ["get_weather", "get", "get_weather_2", "run", "search-web", "näh", "mcp__x__read"]
WORDS = [
    "Quito", " is", "\n\n", "\n", " ", "你好", "é", "e\u0301", "👩‍👩‍👧‍👦", "\t", "null", "5",
    "true", "\\", "\\n", "\\u00e9", "<", ">", "</", "<<<", "<tool", "</tool_call", "<|", "|>", "{", "}", "}}",
    "[", "]", '"', "'", "`", ",", ":", "=", "<function", "<param", "</par", "</arg_val", "[TOOL", "[ARGS",
    "<|tool_call", "call:", "<|open|", "]]", "(", ")",
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", '{"name": "get"}', "<think>", "</think>",
    '{"a": "<b>"}', '"quoted \\" brace}"', "x < y > z", "<b>bold</b>", "\\\\", "\u2028", "\x7f", "0.5",
]  # fmt: skip

texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6).map("".join)
numbers = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | texts
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


@dataclass(frozen=True)
class Format:
    """A call format. `parser`: upstream's module, given the text between `start` and `end`. `keys`, `values`:
    what the format can carry. `names`: the tools that can be called."""

    parser: str
    start: str
    end: str
    write_one: Callable[[str, Arguments], str]
    keys: st.SearchStrategy[str]
    values: st.SearchStrategy[Any]
    names: Sequence[str] = tuple(NAMES)
    is_section: bool = False
    """Whether all calls are between one start and one end marker."""
    brackets: tuple[str, str] = ("", "")
    """Text around the calls of a section, in addition to its markers."""
    between: str = ""
    needs_arguments: bool = False
    """Whether upstream's parser requires arguments."""
    glue: str = "\n"

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [self.write_one(name, arguments) for name, arguments in calls]
        if self.is_section:
            return self.start + self.between.join(bodies).join(self.brackets) + self.end
        return self.glue.join(self.start + body + self.end for body in bodies)

    def by_upstream(self, calls: Sequence[Call], tools: Sequence[Any]) -> list[Call]:
        parse = importlib.import_module(f"mlx_lm.tool_parsers.{self.parser}").parse_tool_call
        bodies = [self.write_one(name, arguments) for name, arguments in calls]
        said = [self.between.join(bodies).join(self.brackets)] if self.is_section else bodies
        read: list[Call] = []
        for body in said:
            parsed = parse(body, tools)
            read += [(c["name"], c["arguments"]) for c in (parsed if isinstance(parsed, list) else [parsed])]
        return read


def kind_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def schema_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {key: {"type": kind_of(value)} for key, value in arguments.items()},
    }


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def _object(name: str, arguments: Arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=len(arguments) % 2 == 0)


def _tagged(
    opening: str, key: str, key_end: str, value_end: str, end: str, around: str = ""
) -> Callable[[str, Arguments], str]:
    def write(name: str, arguments: Arguments) -> str:
        parts = [f"{key}{k}{key_end}{around}{as_text(v)}{around}{value_end}\n" for k, v in arguments.items()]
        return f"{opening.format(name=name)}{''.join(parts)}{end}"

    return write


def _param(name: str, arguments: Arguments) -> str:
    parts = []
    for key, value in arguments.items():
        text = as_text(value)
        text = f"<![CDATA[{text}]]>" if set(text) & set("<&\n") or text.strip() != text else text
        parts.append(f'<param name="{key}">{text}</param>')
    return f'"{name}">{"".join(parts)}'


def _xtml(name: str, arguments: Arguments) -> str:
    kinds = {"integer": "number", "null": "null"}
    parts = [
        f'<|open|>argument key="{key}" type="{kinds.get(kind_of(value), kind_of(value))}"<|sep|>'
        f"{as_text(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    ]
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(parts)}<|close|>call<|sep|>'


def _gemma(value: Any, delimiter: str) -> str:
    match value:
        case str():
            return f"{delimiter}{value}{delimiter}"
        case dict():
            return "{" + ",".join(f"{k}:{_gemma(v, delimiter)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(item, delimiter) for item in value) + "]"
    return dumped(value)


def _gemma_call(delimiter: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: f"call:{name}{_gemma(arguments, delimiter)}"


def _pythonic(name: str, arguments: Arguments) -> str:
    written = (dumped(v) if isinstance(v, dict) else repr(v) for v in arguments.values())
    return f"{name}({', '.join(f'{k}={v}' for k, v in zip(arguments, written, strict=True))})"


def without(*marks: str) -> st.SearchStrategy[str]:
    return texts.filter(lambda text: not any(mark in text for mark in marks))


def not_null(*marks: str) -> st.SearchStrategy[str]:
    """Draw strings other than `null`, which some of upstream's parsers read as None."""
    return without(*marks).filter(lambda text: text.lower() != "null")


def trimmed(*marks: str) -> st.SearchStrategy[str]:
    """Draw strings that upstream's parsers, which strip white space, leave unchanged."""
    return not_null(*marks).map(str.strip).filter(lambda text: text.lower() != "null")


def _nested_of(strings: st.SearchStrategy[str], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    inner = st.none() | st.booleans() | numbers | strings
    return st.recursive(
        inner, lambda i: st.lists(i, max_size=3) | st.dictionaries(keys, i, max_size=3), max_leaves=6
    )


def _free(strings: st.SearchStrategy[str], *marks: str) -> st.SearchStrategy[Any]:
    """Draw strings unchanged, and other JSON values without the marks that end a value."""
    return strings | nested.filter(
        lambda value: not isinstance(value, str) and not any(mark in dumped(value) for mark in marks)
    )


FORMATS = {
    "json_tools": Format("json_tools", "<tool_call>\n", "\n</tool_call>", _object, texts, nested),
    "qwen3_coder": Format(
        "qwen3_coder", "<tool_call>\n", "\n</tool_call>",
        _tagged("<function={name}>\n", "<parameter=", ">", "</parameter>", "</function>", "\n"),
        words, _free(not_null("</parameter>"), "</parameter>"),
    ),
    "mistral": Format(
        "mistral", "[TOOL_CALLS]", "", lambda name, arguments: f"{name}[ARGS]{dumped(arguments)}",
        texts, nested,
        names=[name for name in NAMES if name.isascii()], glue="",
    ),
    "mistral_list": Format(
        "mistral", "[TOOL_CALLS]", "", _object, texts, nested, is_section=True, between=", ",
        brackets=(" [", "]"),
    ),
    "glm47": Format(
        "glm47", "<tool_call>", "</tool_call>",
        _tagged("{name}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", ""),
        words, _free(trimmed("</arg_value>"), "</arg_value>"),
    ),
    "gemma4": Format(
        "gemma4", "<|tool_call>", "<tool_call|>",
        _gemma_call('<|"|>'),
        words, _nested_of(without('<|"|>', "\x00"), words), names=[name for name in NAMES if name.isascii()],
    ),
    "function_gemma": Format(
        "function_gemma", "<start_function_call>", "<end_function_call>",
        _gemma_call("<escape>"),
        words, st.none() | st.booleans() | numbers | without("<escape>", "}"),
        names=["get", "run", "get_weather"],
    ),
    "pythonic": Format(
        "pythonic", "<|tool_call_start|>", "<|tool_call_end|>", _pythonic,
        words.filter(lambda word: not iskeyword(word)), nested,
        names=["get", "run", "get_weather"], is_section=True, between=", ", brackets=("[", "]"),
    ),
    "minimax_m2": Format(
        "minimax_m2", "<minimax:tool_call>\n", "\n</minimax:tool_call>",
        _tagged('<invoke name="{name}">\n', '<parameter name="', '">', "</parameter>", "</invoke>"),
        words, _free(trimmed("</parameter>", "</invoke>"), "</invoke>"), is_section=True, between="\n",
    ),
    "kimi_k2": Format(
        "kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        lambda name, arguments: f"<|tool_call_begin|>functions.{name}:{len(arguments)}"
        f"<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>",
        texts, nested, is_section=True,
    ),
    "kimi_k3": Format(
        "kimi_k3", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _xtml,
        words, _free(without("<|close|>"), "<|close|>"), is_section=True,
    ),
    "longcat": Format(
        "longcat", "<longcat_tool_call>", "</longcat_tool_call>",
        _tagged(
            "{name}\n", "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>", "",
        ),
        words, _free(trimmed("</longcat_arg_value>"), "</longcat_arg_value>"), needs_arguments=True,
    ),
    "minicpm5": Format(
        "minicpm5", "<function name=", "</function>", _param,
        words, _free(not_null("]]>", "</param>", "</function>"), "</", "]]>"),
    ),
    "muse_spark": Format(
        "muse_spark", "<atem:function_calls>\n", "\n</atem:function_calls>",
        _tagged(
            '<atem:invoke name="{name}">\n', '<atem:parameter name="', '" string="x">', "</atem:parameter>",
            "</atem:invoke>",
        ),
        words, _free(trimmed("</atem:").filter(lambda text: not _is_json(text)), "</atem:"),
        is_section=True, between="\n",
    ),
}  # fmt: skip


FORMATS["laguna"] = replace(FORMATS["glm47"], parser="laguna")
FORMATS["function_alone"] = replace(FORMATS["qwen3_coder"], start="", end="")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@st.composite
def calls_in(draw: st.DrawFn, form: Format, count_max: int = 3) -> list[Call]:
    """Draw calls, at most one per tool, because each tool's schema is derived from its call."""
    names = draw(st.lists(st.sampled_from(list(form.names)), min_size=1, max_size=count_max, unique=True))
    return [(name, draw(st.dictionaries(form.keys, form.values, max_size=3))) for name in names]


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return tools as clients send them: the called ones and others."""
    schemas: dict[str, Any] = {name: {"type": "object", "properties": {}} for name in NAMES}
    schemas |= {name: schema_of(arguments) for name, arguments in calls}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
