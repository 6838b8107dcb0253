"""Tool-call formats, by the markers that open them.

These are the formats of upstream's parsers (`mlx_lm.tool_parsers`), and those that models trained on several
formats fall back to. Formats that share a marker are told apart by what follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from worker.output.calls.literals import (
    ATOM_CHARACTERS_MAX,
    FUNCTION_GEMMA,
    GEMMA,
    JSON,
    LOOSE_JSON,
    PYTHON,
    Dialect,
    quote,
    read_object,
    read_value,
    transcode,
)
from worker.output.calls.objects import read_bare_list, read_bare_object, read_objects
from worker.output.calls.schemas import kinds_of
from worker.output.calls.source import CLOSINGS, BrokenError, Steps
from worker.output.calls.tagged import (
    ARG_KEY,
    ATEM,
    DSML,
    FUNCTION,
    HEAD_CHARACTERS_MAX,
    INVOKE,
    LONGCAT,
    PARAM,
    Tags,
    read_arguments,
    read_call,
    read_end,
    read_name,
    read_text,
    stream_text,
    unquoted,
)
from worker.output.calls.writer import CallWriter, Reader

_FUNCTIONS = {"<function=": FUNCTION, "<function name=": PARAM}
_DSMLS = {"<｜DSML｜invoke": DSML}
_INVOKES, _INVOKES_END = {"<invoke name=": INVOKE}, "</minimax:tool_call>"
_ATEMS, _ATEMS_END = {"<atem:invoke": ATEM}, "</atem:function_calls>"

_WORD = re.compile(r"\w+")
_NAMED_INVOKE = "<invoke name="

_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"

_KIMI_CALL = "<|tool_call_begin|>"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)

_XTML_OPEN_CALL, _XTML_CLOSE_CALL = "<|open|>call", "<|close|>call<|sep|>"
_XTML_OPEN_ARGUMENT, _XTML_CLOSE_ARGUMENT = "<|open|>argument", "<|close|>argument<|sep|>"
_XTML_OPEN_JSON, _XTML_CLOSE_JSON = "<|open|>json", "<|close|>json<|sep|>"
_XTML_CLOSE_TOOLS = "<|close|>tools<|sep|>"
_XTML_SEPARATOR = "<|sep|>"
_XTML_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_XTML_ARGUMENT = Tags(
    _XTML_OPEN_ARGUMENT,
    _XTML_SEPARATOR,
    _XTML_CLOSE_ARGUMENT,
    _XTML_CLOSE_CALL,
    guesses=True,
)


# --- Kimi K3: tags made of special tokens, with attributes for the types of values ---


def read_xtml(writer: CallWriter) -> Steps[None]:
    """Read all calls of a section."""
    source = writer.source
    yield from source.spaces()
    yield from source.expect(_XTML_OPEN_CALL)
    while True:
        attributes = yield from _read_xtml_attributes(writer)
        writer.begin(attributes.get("tool", ""))
        yield from _read_xtml_body(writer)
        yield from source.spaces()
        if not (yield from source.skip(_XTML_OPEN_CALL)):
            return (yield from read_end(writer, _XTML_CLOSE_TOOLS))


def _read_xtml_body(writer: CallWriter) -> Steps[None]:
    source = writer.source
    yield from source.spaces()
    if (yield from source.skip(_XTML_OPEN_JSON)):
        yield from _read_xtml_attributes(writer)
        yield from source.spaces()
        yield from read_object(source, LOOSE_JSON, writer.say)
        writer.close()
        yield from read_end(writer, _XTML_CLOSE_JSON)
        return (yield from read_end(writer, _XTML_CLOSE_CALL))
    while (yield from source.expect(_XTML_OPEN_ARGUMENT, _XTML_CLOSE_CALL)) == _XTML_OPEN_ARGUMENT:
        yield from _read_xtml_argument(writer)
        yield from source.spaces()
    return writer.close_keys()


def _read_xtml_argument(writer: CallWriter) -> Steps[None]:
    """Read an argument. Its type is that of the schema, else the one the model wrote."""
    attributes = yield from _read_xtml_attributes(writer)
    if "key" not in attributes:
        raise BrokenError
    writer.key(attributes["key"])
    kinds = kinds_of(writer.schema, attributes["key"])
    if kinds:
        yield from read_text(writer, _XTML_ARGUMENT, kinds)
    elif attributes.get("type", "string") == "string":
        yield from stream_text(writer, _XTML_ARGUMENT, ())
    else:
        text, _ = yield from writer.source.until(_XTML_CLOSE_ARGUMENT)
        writer.say(transcode(text, JSON) or quote(text))


def _read_xtml_attributes(writer: CallWriter) -> Steps[dict[str, str]]:
    text, _ = yield from writer.source.until(_XTML_SEPARATOR, characters_max=HEAD_CHARACTERS_MAX)
    return {name: _unescaped(value) for name, value in _XTML_ATTRIBUTE.findall(text)}


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


# --- Mistral and Kimi K2: a header for the name, followed by one JSON object of arguments ---


def read_mistral(writer: CallWriter) -> Steps[None]:
    """Read one or more `name[ARGS]{…}`, or JSON objects as older models write. There is no end marker."""
    source = writer.source
    if (yield from source.ahead()) in ("[", "{"):
        return (yield from read_objects(writer))
    while True:
        name, end = yield from read_name(writer, "[CALL_ID]", "[ARGS]", "{")
        if end == "[CALL_ID]":
            yield from source.until("[ARGS]", characters_max=HEAD_CHARACTERS_MAX)
        elif end == "{":
            source.back()
        writer.begin(name)
        yield from source.spaces()
        yield from read_object(source, LOOSE_JSON, writer.say)
        writer.close()
        yield from source.spaces()


def read_kimi_section(writer: CallWriter) -> Steps[None]:
    """Read the calls of a section, up to its end marker."""
    yield from writer.source.spaces()
    yield from writer.source.expect(_KIMI_CALL)
    yield from read_kimi(writer)


def read_kimi(writer: CallWriter) -> Steps[None]:
    """Read one or more calls. They keep the model's own ids, which its template renders as call names."""
    source = writer.source
    while True:
        head, _ = yield from source.until("<|tool_call_argument_begin|>", characters_max=HEAD_CHARACTERS_MAX)
        found = _KIMI_HEAD.fullmatch(head.strip())
        writer.begin(found[1] if found else "", head.strip())
        yield from source.spaces()
        if (yield from source.skip("<|tool_call_end|>")):
            writer.close("{}")
        else:
            yield from read_object(source, LOOSE_JSON, writer.say)
            writer.close()
            yield from read_end(writer, "<|tool_call_end|>")
        yield from source.spaces()
        if not (yield from source.skip(_KIMI_CALL)):
            return (yield from read_end(writer, "<|tool_calls_section_end|>"))


_HARMONY_ENDS = ("<|channel|>", "<|constrain|>", "<|message|>", " ")


def read_harmony(writer: CallWriter) -> Steps[None]:
    """Read a call behind its recipient (gpt-oss): what else is in the head of its message, and its object."""
    source = writer.source
    name, end = yield from read_name(writer, *_HARMONY_ENDS)
    writer.begin(name)
    if end != "<|message|>":
        yield from source.until("<|message|>", characters_max=HEAD_CHARACTERS_MAX)
    yield from source.spaces()
    yield from read_object(source, LOOSE_JSON, writer.say)
    writer.close()
    yield from read_end(writer, "<|call|>")


# --- calls that look like code: `[name(key=value)]`, and Gemma's `call:name{key:value}` ---


def read_gemma(writer: CallWriter, dialect: Dialect, end: str) -> Steps[None]:
    """Read one or more calls."""
    source = writer.source
    yield from source.spaces()
    yield from source.expect("call:")
    while True:
        name, _ = yield from read_name(writer, "{")
        source.back()
        writer.begin(name)
        yield from read_object(source, dialect, writer.say)
        writer.close()
        yield from source.spaces()
        if not (yield from source.skip("call:")):
            return (yield from read_end(writer, end))


def read_pythonic(writer: CallWriter, end: str) -> Steps[None]:
    """Read a list of calls, or JSON objects, which some models write instead."""
    source = writer.source
    if (yield from source.ahead()) == "{":
        yield from read_objects(writer)
        return (yield from read_end(writer, end))
    yield from source.spaces()
    yield from source.expect("[")
    if (yield from source.ahead()) == "{":
        yield from read_objects(writer, is_list=True)
        return (yield from read_end(writer, end))
    yield from _read_pythonic_calls(writer)
    return (yield from read_end(writer, end))


def read_bare_calls(writer: CallWriter) -> Steps[None]:
    """Read a list of calls without a marker, in JSON or like code (Llama 4)."""
    yield from writer.source.expect("[")
    if (yield from writer.source.ahead()) == "{":
        yield from read_bare_list(writer)
    else:
        yield from _read_pythonic_calls(writer)


def _read_pythonic_calls(writer: CallWriter) -> Steps[None]:
    """Read the calls of a list, and its end."""
    source, end = writer.source, ","
    while end == ",":
        yield from source.spaces()
        yield from _read_pythonic_call(writer)
        yield from source.spaces()
        end = yield from source.expect(",", "]")
    source.take()


def read_lines(writer: CallWriter, end: str) -> Steps[None]:
    """Read calls that follow each other, one a line (OLMo 3)."""
    source = writer.source
    while (yield from source.ahead()) not in ("<", ""):
        yield from source.spaces()
        yield from _read_pythonic_call(writer)
    yield from read_end(writer, end)


def read_python_tag(writer: CallWriter) -> Steps[None]:
    """Read JSON objects, or a call like code (Llama 3)."""
    if (yield from writer.source.ahead()) in ("{", "["):
        yield from read_objects(writer)
    else:
        yield from writer.source.spaces()
        yield from _read_pythonic_call(writer)


def _read_pythonic_call(writer: CallWriter) -> Steps[None]:
    """Read a call. It is emitted once it has a keyword argument, or none: positional ones have no name."""
    source = writer.source
    name, _ = yield from read_name(writer, ".call(", "(")
    has_begun = False
    end = ","
    while end == ",":
        yield from source.spaces()
        key = yield from source.run(_WORD, ATOM_CHARACTERS_MAX)
        yield from source.spaces()
        if (yield from source.expect("=", ")")) == ")":
            if key:
                raise BrokenError
            break
        if not has_begun:
            writer.begin(name)
            has_begun = True
        yield from source.spaces()
        writer.key(key)
        yield from read_value(source, PYTHON, writer.say)
        yield from source.spaces()
        end = yield from source.expect(",", ")")
    if not has_begun:
        writer.begin(name)
    writer.close_keys()


# --- calls between tags, and those of models trained on several formats ---


def _read_tagged(writer: CallWriter, openings: Mapping[str, Tags], end: str) -> Steps[None]:
    source = writer.source
    yield from source.spaces()
    opening = yield from source.expect(*openings)
    while opening:
        yield from read_call(writer, openings[opening], opening)
        yield from source.spaces()
        opening = yield from source.skip(*openings)
    yield from read_end(writer, end)


def _read_opened(writer: CallWriter, tags: Tags, opening: str, end: str) -> Steps[None]:
    """Read a call whose own opening tag was the marker."""
    yield from read_call(writer, tags, opening)
    yield from read_end(writer, end)


def _read_named(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call that begins with its bare name."""
    name, end = yield from read_name(writer, tags.key, tags.end, "{")
    writer.source.back()
    writer.begin(name)
    if end == "{":
        yield from read_object(writer.source, LOOSE_JSON, writer.say)
        writer.close()
        yield from read_end(writer, tags.end)
    else:
        yield from read_arguments(writer, tags)


def _read_any(writer: CallWriter, tags: Tags, openings: Mapping[str, Tags]) -> Steps[None]:
    """Read objects, tags or a call with a bare name, depending on the first character."""
    match (yield from writer.source.ahead()):
        case "{" | "[":
            yield from _read_objects(writer, tags.end)
        case "<" if openings:
            yield from writer.source.spaces()
            if (yield from writer.source.skip(_NAMED_INVOKE)):
                yield from _read_own_tags(writer, tags.end)
            else:
                yield from _read_tagged(writer, openings, tags.end)
        case _:
            yield from _read_named(writer, tags)


def _read_own_tags(writer: CallWriter, end: str) -> Steps[None]:
    """Read calls whose arguments are tags of their own names (MiniMax M3)."""
    source = writer.source
    opening = _NAMED_INVOKE
    while opening:
        name, _ = yield from read_name(writer, ">")
        writer.begin(name)
        while True:
            yield from source.spaces()
            if (yield from source.expect("</invoke>", "<")) != "<":
                break
            key, _ = yield from source.until(">", characters_max=HEAD_CHARACTERS_MAX)
            tags = Tags("<", ">", f"</{key}>", "</invoke>", guesses=True)
            writer.key(unquoted(key.removeprefix("parameter name=")))
            yield from read_text(writer, tags, kinds_of(writer.schema, key))
        writer.close_keys()
        yield from source.spaces()
        opening = yield from source.skip(_NAMED_INVOKE)
    yield from read_end(writer, end)


def _read_function_calls(writer: CallWriter) -> Steps[None]:
    if (yield from writer.source.ahead()) == "<":
        yield from _read_tagged(writer, _INVOKES, "</function_calls>")
    else:
        yield from read_lines(writer, "</function_calls>")


# --- DeepSeek R1 to V3.1: a type and a name, or a name alone, before the arguments ---


def read_deepseek_section(writer: CallWriter) -> Steps[None]:
    """Read the calls of a section, up to its end marker."""
    yield from writer.source.spaces()
    yield from writer.source.expect(_DEEPSEEK_CALL)
    yield from read_deepseek(writer)


def read_deepseek(writer: CallWriter) -> Steps[None]:
    """Read one or more calls."""
    source = writer.source
    while True:
        head, _ = yield from source.until(_DEEPSEEK_SEPARATOR, characters_max=HEAD_CHARACTERS_MAX)
        name = head.strip()
        if name == "function" and not writer.has_parameter(name):
            name, _ = yield from read_name(writer, "\n", "```", "{")
            source.back()
        writer.begin(name)
        yield from source.spaces()
        yield from source.skip("```json", "```")
        yield from source.spaces()
        yield from read_object(source, LOOSE_JSON, writer.say)
        writer.close()
        yield from read_end(writer, "```")
        yield from read_end(writer, _DEEPSEEK_END)
        yield from source.spaces()
        if not (yield from source.skip(_DEEPSEEK_CALL)):
            return (yield from read_end(writer, "<｜tool▁calls▁end｜>"))


def _read_objects(writer: CallWriter, end: str) -> Steps[None]:
    yield from read_objects(writer)
    yield from read_end(writer, end)


READERS: Mapping[str, Reader] = {
    "<tool_call>": partial(_read_any, tags=ARG_KEY, openings=_FUNCTIONS),
    "<function=": partial(_read_opened, tags=FUNCTION, opening="<function=", end=ARG_KEY.end),
    "<function name=": partial(read_call, tags=PARAM, opening="<function name="),
    "<longcat_tool_call>": partial(_read_any, tags=LONGCAT, openings={}),
    "<minimax:tool_call>": partial(_read_tagged, openings=_INVOKES, end=_INVOKES_END),
    "<invoke name=": partial(_read_opened, tags=INVOKE, opening="<invoke name=", end=_INVOKES_END),
    "<atem:function_calls>": partial(_read_tagged, openings=_ATEMS, end=_ATEMS_END),
    "[TOOL_CALLS]": read_mistral,
    "<|tool_call>": partial(read_gemma, dialect=GEMMA, end="<tool_call|>"),
    "<start_function_call>": partial(read_gemma, dialect=FUNCTION_GEMMA, end="<end_function_call>"),
    "<|tool_call_start|>": partial(read_pythonic, end="<|tool_call_end|>"),
    "<|tool_calls_section_begin|>": read_kimi_section,
    "<|tool_call_begin|>": read_kimi,
    "<|open|>tools<|sep|>": read_xtml,
    "<|python_tag|>": read_python_tag,
    "<tools>": read_objects,
    "<tool_calls>": read_objects,
    "<function_calls>": _read_function_calls,
    "<seed:tool_call>": partial(_read_tagged, openings=_FUNCTIONS, end="</seed:tool_call>"),
    "<TOOLCALL>": partial(_read_objects, end="</TOOLCALL>"),  # Nemotron
    "<|tool_call|>": partial(_read_objects, end="<|/tool_call|>"),  # Granite 3, Phi-4-mini
    "<|START_ACTION|>": partial(_read_objects, end="<|END_ACTION|>"),  # Command
    "<｜tool▁calls▁begin｜>": read_deepseek_section,
    _DEEPSEEK_CALL: read_deepseek,
    "<｜DSML｜function_calls>": partial(_read_tagged, openings=_DSMLS, end="</｜DSML｜function_calls>"),
    "<｜DSML｜tool_calls>": partial(_read_tagged, openings=_DSMLS, end="</｜DSML｜tool_calls>"),
}
"""Readers by marker."""
BARE: Mapping[str, Reader] = {"{": read_bare_object, "[": read_bare_calls}
"""Readers of calls without a marker, by the first character of the answer."""


LITERALS = frozenset(
    [
        *READERS,
        *(_INVOKES_END, *_ATEMS, _ATEMS_END, "<tool_call|>", "<end_function_call>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
        *(*_HARMONY_ENDS[:-1], "<|call|>"),
        *(_DEEPSEEK_SEPARATOR, _DEEPSEEK_END),
        *("[ARGS]", "[CALL_ID]", GEMMA.delimiter, FUNCTION_GEMMA.delimiter),
        *(_XTML_OPEN_CALL, _XTML_CLOSE_CALL, _XTML_OPEN_ARGUMENT, _XTML_CLOSE_ARGUMENT, _XTML_OPEN_JSON),
        *(_XTML_CLOSE_JSON, _XTML_CLOSE_TOOLS, _XTML_SEPARATOR, *CLOSINGS),
        *(tag for tags in (FUNCTION, INVOKE, PARAM, ATEM, ARG_KEY, LONGCAT, DSML) for tag in tags.literals),
    ]
)
"""All literals that readers search for and that may be special tokens of a model."""
