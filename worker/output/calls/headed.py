"""Tool calls with a header for the name, followed by one JSON object of arguments: Mistral and Kimi K2."""

from __future__ import annotations

import re

from worker.output.calls.literals import JSON, read_object
from worker.output.calls.objects import read_objects
from worker.output.calls.source import Steps
from worker.output.calls.tagged import HEAD_CHARACTERS_MAX, read_end, read_name
from worker.output.calls.writer import CallWriter

KIMI_CALL = "<|tool_call_begin|>"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)


def read_mistral(writer: CallWriter) -> Steps[None]:
    """Read one or more `name[ARGS]{…}`, or JSON objects as older models write. There is no end marker."""
    source = writer.source
    if (yield from source.ahead()) in ("[", "{"):
        return (yield from read_objects(writer))
    while True:
        name, end = yield from read_name(writer, "[CALL_ID]", "[ARGS]")
        if end == "[CALL_ID]":
            yield from source.until("[ARGS]", characters_max=HEAD_CHARACTERS_MAX)
        writer.begin(name)
        yield from source.spaces()
        yield from read_object(source, JSON, writer.say)
        writer.close()
        yield from source.spaces()


def read_kimi_section(writer: CallWriter) -> Steps[None]:
    """Read the calls of a section, up to its end marker."""
    yield from writer.source.spaces()
    yield from writer.source.expect(KIMI_CALL)
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
            yield from read_object(source, JSON, writer.say)
            writer.close()
            yield from read_end(writer, "<|tool_call_end|>")
        yield from source.spaces()
        if not (yield from source.skip(KIMI_CALL)):
            return (yield from read_end(writer, "<|tool_calls_section_end|>"))
