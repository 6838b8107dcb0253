"""Tool-call formats, by the markers that open them.

These are the formats of upstream's parsers (`mlx_lm.tool_parsers`), and those that models trained on several
formats fall back to. Formats that share a marker are told apart by what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from worker.output.calls import xtml
from worker.output.calls.expressions import read_gemma, read_pythonic
from worker.output.calls.headed import read_kimi, read_kimi_section, read_mistral
from worker.output.calls.literals import FUNCTION_GEMMA, GEMMA, JSON, read_object
from worker.output.calls.objects import read_objects
from worker.output.calls.source import Steps
from worker.output.calls.tagged import (
    ARG_KEY,
    ATEM,
    FUNCTION,
    INVOKE,
    LONGCAT,
    PARAM,
    Tags,
    read_arguments,
    read_call,
    read_end,
    read_name,
)
from worker.output.calls.writer import CallWriter
from worker.output.calls.xtml import read_xtml

Reader = Callable[[CallWriter], Steps[None]]
"""Reads all calls behind a marker."""

_FUNCTIONS = {"<function=": FUNCTION, "<function name=": PARAM}
_INVOKES, _INVOKES_END = {"<invoke name=": INVOKE}, "</minimax:tool_call>"
_ATEMS, _ATEMS_END = {"<atem:invoke": ATEM}, "</atem:function_calls>"


def _read_tagged(writer: CallWriter, openings: Mapping[str, Tags], end: str) -> Steps[None]:
    source = writer.source
    yield from source.spaces()
    opening = yield from source.expect(*openings)
    while opening:
        yield from read_call(writer, openings[opening])
        yield from source.spaces()
        opening = yield from source.skip(*openings)
    yield from read_end(writer, end)


def _read_opened(writer: CallWriter, tags: Tags, end: str) -> Steps[None]:
    """Read a call whose own opening tag was the marker."""
    yield from read_call(writer, tags)
    yield from read_end(writer, end)


def _read_named(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call that begins with its bare name."""
    name, end = yield from read_name(writer, tags.key, tags.end, "{")
    writer.source.back()
    writer.begin(name)
    if end == "{":
        yield from read_object(writer.source, JSON, writer.say)
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
            yield from _read_tagged(writer, openings, tags.end)
        case _:
            yield from _read_named(writer, tags)


def _read_objects(writer: CallWriter, end: str) -> Steps[None]:
    yield from read_objects(writer)
    yield from read_end(writer, end)


READERS: Mapping[str, Reader] = {
    "<tool_call>": partial(_read_any, tags=ARG_KEY, openings=_FUNCTIONS),
    "<function=": partial(_read_opened, tags=FUNCTION, end=ARG_KEY.end),
    "<function name=": partial(read_call, tags=PARAM),
    "<longcat_tool_call>": partial(_read_any, tags=LONGCAT, openings={}),
    "<minimax:tool_call>": partial(_read_tagged, openings=_INVOKES, end=_INVOKES_END),
    "<invoke name=": partial(_read_opened, tags=INVOKE, end=_INVOKES_END),
    "<atem:function_calls>": partial(_read_tagged, openings=_ATEMS, end=_ATEMS_END),
    "[TOOL_CALLS]": read_mistral,
    "<|tool_call>": partial(read_gemma, dialect=GEMMA, end="<tool_call|>"),
    "<start_function_call>": partial(read_gemma, dialect=FUNCTION_GEMMA, end="<end_function_call>"),
    "<|tool_call_start|>": partial(read_pythonic, end="<|tool_call_end|>"),
    "<|tool_calls_section_begin|>": read_kimi_section,
    "<|tool_call_begin|>": read_kimi,
    "<|open|>tools<|sep|>": read_xtml,
    "<|python_tag|>": read_objects,
}
"""Readers by marker. Calls without a marker are read by `objects.read_bare_object`."""


LITERALS = frozenset(
    [
        *READERS,
        *(_INVOKES_END, *_ATEMS, _ATEMS_END, "<tool_call|>", "<end_function_call>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
        *("[ARGS]", "[CALL_ID]", GEMMA.delimiter, FUNCTION_GEMMA.delimiter),
        *(xtml.OPEN_CALL, xtml.CLOSE_CALL, xtml.OPEN_ARGUMENT, xtml.CLOSE_ARGUMENT, xtml.OPEN_JSON),
        *(xtml.CLOSE_JSON, xtml.CLOSE_TOOLS, xtml.SEPARATOR),
        *(tag for tags in (FUNCTION, INVOKE, PARAM, ATEM, ARG_KEY, LONGCAT) for tag in tags.literals),
    ]
)
"""All literals that readers search for and that may be special tokens of a model."""
