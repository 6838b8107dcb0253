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
    PYTHON,
    Dialect,
    read_value,
)
from worker.output.calls.objects import read_objects
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
    read_body,
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


# --- a header for the name, followed by one object of arguments ---


def read_mistral(writer: CallWriter) -> Steps[None]:
    """Read one or more `name[ARGS]{…}`, or JSON objects as older models write. There is no end marker."""
    source = writer.source
    if (yield from source.ahead()) in ("[", "{"):
        return (yield from read_code(writer))
    while True:
        name, end = yield from read_name(writer, "[CALL_ID]", "[ARGS]", "{")
        if end == "[CALL_ID]":
            yield from source.until("[ARGS]", characters_max=HEAD_CHARACTERS_MAX)
        elif end == "{":
            source.back()
        writer.begin(name)
        yield from read_body(writer)
        yield from source.spaces()


def read_kimi(writer: CallWriter) -> Steps[None]:
    """Read one or more calls of Kimi K2. They keep the model's own ids, which its template renders as call
    names."""
    source = writer.source
    found: str = _KIMI_CALL
    yield from source.find(_KIMI_CALL)
    while found == _KIMI_CALL:
        head, _ = yield from source.until("<|tool_call_argument_begin|>", characters_max=HEAD_CHARACTERS_MAX)
        parts = _KIMI_HEAD.fullmatch(head.strip())
        writer.begin(parts[1] if parts else "", head.strip())
        if (yield from source.find("<|tool_call_end|>")) == "<|tool_call_end|>":
            writer.close("{}")
        else:
            yield from read_body(writer, "<|tool_call_end|>")
        found = yield from source.find(_KIMI_CALL)
    yield from read_end(writer, "<|tool_calls_section_end|>")


def read_deepseek(writer: CallWriter) -> Steps[None]:
    """Read one or more calls of DeepSeek R1 to V3.1: a type and a name, or a name alone, before the
    arguments."""
    source = writer.source
    found: str = _DEEPSEEK_CALL
    yield from source.find(_DEEPSEEK_CALL)
    while found == _DEEPSEEK_CALL:
        head, _ = yield from source.until(_DEEPSEEK_SEPARATOR, characters_max=HEAD_CHARACTERS_MAX)
        name = head.strip()
        if name == "function" and not writer.has_parameter(name):
            name, _ = yield from read_name(writer, "\n", "```", "{")
            source.back()
        writer.begin(name)
        yield from source.find("```json", "```")
        yield from read_body(writer, "```", _DEEPSEEK_END)
        found = yield from source.find(_DEEPSEEK_CALL)
    yield from read_end(writer, "<｜tool▁calls▁end｜>")


_HARMONY_ENDS = ("<|channel|>", "<|constrain|>", "<|message|>", " ")


def read_harmony(writer: CallWriter) -> Steps[None]:
    """Read a call behind its recipient (gpt-oss): what else is in the head of its message, and its object."""
    name, end = yield from read_name(writer, *_HARMONY_ENDS)
    writer.begin(name)
    if end != "<|message|>":
        yield from writer.source.until("<|message|>", characters_max=HEAD_CHARACTERS_MAX)
    yield from read_body(writer, "<|call|>")


def read_gemma(writer: CallWriter, dialect: Dialect, end: str) -> Steps[None]:
    """Read one or more `call:name{key:value}`."""
    source = writer.source
    found = yield from source.find("call:")
    while found == "call:":
        name, _ = yield from read_name(writer, "{")
        source.back()
        writer.begin(name)
        yield from read_body(writer, dialect=dialect)
        found = yield from source.find("call:")
    if not writer.has_begun:
        raise BrokenError
    yield from read_end(writer, end)


# --- calls that look like code: `[name(key=value)]` ---


def read_code(writer: CallWriter, end: str = "", *, is_bare: bool = False) -> Steps[None]:
    """Read calls like code or as JSON objects, in a list or one behind the other. `is_bare`: there is no
    marker."""
    source = writer.source
    yield from source.spaces()
    closing = "]" if (yield from source.skip("[")) else ""
    if (yield from source.ahead()) == "{":
        yield from read_objects(writer, closing, is_bare=is_bare)
    else:
        found = ","
        while found not in ("<", ""):
            yield from source.spaces()
            yield from _read_code_call(writer)
            yield from source.spaces()
            found = (yield from source.expect(",", "]")) if closing else (yield from source.peek())
            if found == closing:
                source.take()
                break
    yield from read_end(writer, end)


def _read_code_call(writer: CallWriter) -> Steps[None]:
    """Read a call. It is emitted once it has a keyword argument, or none: positional ones have no name."""
    source = writer.source
    name, _ = yield from read_name(writer, ".call(", "(")
    writer.is_named = True
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
            yield from read_code(writer, tags.end)
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
    is_tagged = (yield from writer.source.ahead()) == "<"
    tagged = partial(read_tagged, tags=[INVOKE])
    yield from (tagged if is_tagged else read_code)(writer, end="</function_calls>")


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
    "<|tool_calls_section_begin|>": read_kimi,
    "<|tool_call_begin|>": read_kimi,
    "<｜tool▁calls▁begin｜>": read_deepseek,
    _DEEPSEEK_CALL: read_deepseek,
    "<function_calls>": _read_function_calls,
    "<|tool_call_start|>": partial(read_code, end="<|tool_call_end|>"),
    "<|python_tag|>": read_code,
    "<|python_start|>": partial(read_code, end="<|python_end|>"),  # Llama 4
    "<tools>": read_code,
    "<tool_calls>": read_code,
    "<TOOLCALL>": partial(read_code, end="</TOOLCALL>"),  # Nemotron
    "<|tool_call|>": partial(read_code, end="<|/tool_call|>"),  # Granite 3, Phi-4-mini
    "<|START_ACTION|>": partial(read_code, end="<|END_ACTION|>"),  # Command
    **{start: partial(read_tagged, tags=tags, end=end) for start, end, tags in _SECTIONS},
}
"""Readers by marker."""
read_bare = partial(read_code, is_bare=True)
"""Reads calls without a marker, which begin with one of `BARE`."""
BARE = ("{", "[")


LITERALS = frozenset(
    [
        *READERS,
        *(end for _, end, _ in _SECTIONS),
        *("<tool_call|>", "<end_function_call>", "<|python_end|>"),
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
