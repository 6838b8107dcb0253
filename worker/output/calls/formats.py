"""Tool-call formats, by the markers that open them.

These are the formats of upstream's parsers (`mlx_lm.tool_parsers`), and those that models trained on several
formats fall back to. Formats that share a marker are told apart by what follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from worker.output.calls.literals import (
    ATOM_CHARACTERS_MAX,
    FUNCTION_GEMMA,
    GEMMA,
    LOOSE_JSON,
    PYTHON,
    Dialect,
    read_object,
    read_value,
)
from worker.output.calls.objects import read_bare_list, read_bare_object, read_objects
from worker.output.calls.source import CLOSINGS, BrokenError, Steps
from worker.output.calls.tagged import (
    ARG_KEY,
    ATEM,
    DSML,
    FUNCTION,
    HEAD_CHARACTERS_MAX,
    INVOKE,
    LONGCAT,
    NAMED,
    PARAM,
    XTML,
    Tags,
    read_arguments,
    read_end,
    read_name,
    read_tagged,
)
from worker.output.calls.writer import CallWriter, Reader

_WORD = re.compile(r"\w+")
_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"

_KIMI_CALL = "<|tool_call_begin|>"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)

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
    while (yield from source.skip("call")):
        pass
    yield from source.expect(":")
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


def _read_any(writer: CallWriter, tags: Tags, others: Sequence[Tags] = ()) -> Steps[None]:
    """Read objects, tags or a call with a bare name, depending on the first character."""
    match (yield from writer.source.ahead()):
        case "{" | "[":
            yield from _read_objects(writer, tags.end)
        case "<" if others:
            yield from read_tagged(writer, others, tags.end)
        case _:
            yield from _read_named(writer, tags)


def _read_named(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call that begins with its bare name."""
    yield from writer.source.spaces()
    name, _ = yield from read_name(writer, tags.key, tags.end, "{")
    writer.source.back()
    writer.begin(name)
    yield from read_arguments(writer, tags)


def _read_function_calls(writer: CallWriter) -> Steps[None]:
    if (yield from writer.source.ahead()) == "<":
        yield from read_tagged(writer, [INVOKE], "</function_calls>")
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


_SECTIONS = (
    ("<minimax:tool_call>", "</minimax:tool_call>", (INVOKE,)),
    ("<atem:function_calls>", "</atem:function_calls>", (ATEM,)),
    ("<seed:tool_call>", "</seed:tool_call>", (FUNCTION, PARAM)),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", (DSML,)),
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", (DSML,)),
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", (XTML,)),
)
"""What is around calls in tags."""
READERS: Mapping[str, Reader] = {
    "<tool_call>": partial(_read_any, tags=ARG_KEY, others=(FUNCTION, PARAM, NAMED)),
    "<longcat_tool_call>": partial(_read_any, tags=LONGCAT),
    FUNCTION.opening: partial(read_tagged, tags=[FUNCTION], opening=FUNCTION.opening, end="</tool_call>"),
    PARAM.opening: partial(read_tagged, tags=[PARAM], opening=PARAM.opening, end="</tool_call>"),
    INVOKE.opening: partial(read_tagged, tags=[INVOKE], opening=INVOKE.opening, end="</minimax:tool_call>"),
    "[TOOL_CALLS]": read_mistral,
    "<|tool_call>": partial(read_gemma, dialect=GEMMA, end="<tool_call|>"),
    "<start_function_call>": partial(read_gemma, dialect=FUNCTION_GEMMA, end="<end_function_call>"),
    "<|tool_call_start|>": partial(read_pythonic, end="<|tool_call_end|>"),
    "<|tool_calls_section_begin|>": read_kimi_section,
    "<|tool_call_begin|>": read_kimi,
    "<|python_tag|>": read_python_tag,
    "<tools>": read_objects,
    "<tool_calls>": read_objects,
    "<function_calls>": _read_function_calls,
    "<TOOLCALL>": partial(_read_objects, end="</TOOLCALL>"),  # Nemotron
    "<|tool_call|>": partial(_read_objects, end="<|/tool_call|>"),  # Granite 3, Phi-4-mini
    "<|START_ACTION|>": partial(_read_objects, end="<|END_ACTION|>"),  # Command
    "<｜tool▁calls▁begin｜>": read_deepseek_section,
    _DEEPSEEK_CALL: read_deepseek,
    **{start: partial(read_tagged, tags=tags, end=end) for start, end, tags in _SECTIONS},
}
"""Readers by marker."""
BARE: Mapping[str, Reader] = {"{": read_bare_object, "[": read_bare_calls}
"""Readers of calls without a marker, by the first character of the answer."""


LITERALS = frozenset(
    [
        *READERS,
        *(end for _, end, _ in _SECTIONS),
        *("<tool_call|>", "<end_function_call>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
        *(*_HARMONY_ENDS[:-1], "<|call|>"),
        *(_DEEPSEEK_SEPARATOR, _DEEPSEEK_END),
        *("[ARGS]", "[CALL_ID]", GEMMA.delimiter, FUNCTION_GEMMA.delimiter),
        *CLOSINGS,
        *(
            tag
            for tags in (FUNCTION, INVOKE, PARAM, ATEM, ARG_KEY, LONGCAT, DSML, XTML)
            for tag in tags.literals
        ),
    ]
)
"""All literals that readers search for and that may be special tokens of a model."""
