"""Kimi K3's tool calls: tags made of special tokens, with attributes for the types of values."""

from __future__ import annotations

import re

from worker.output.calls.literals import JSON, quote, read_object, transcode
from worker.output.calls.schemas import kinds_of
from worker.output.calls.source import BrokenError, Steps
from worker.output.calls.tagged import HEAD_CHARACTERS_MAX, Tags, Trim, read_end, read_text, stream_text
from worker.output.calls.writer import CallWriter

OPEN_CALL, CLOSE_CALL = "<|open|>call", "<|close|>call<|sep|>"
OPEN_ARGUMENT, CLOSE_ARGUMENT = "<|open|>argument", "<|close|>argument<|sep|>"
OPEN_JSON, CLOSE_JSON = "<|open|>json", "<|close|>json<|sep|>"
CLOSE_TOOLS = "<|close|>tools<|sep|>"
SEPARATOR = "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ARGUMENT = Tags(OPEN_ARGUMENT, SEPARATOR, CLOSE_ARGUMENT, CLOSE_CALL, trim=Trim.NOTHING, guesses=True)


def read_xtml(writer: CallWriter) -> Steps[None]:
    """Read all calls of a section."""
    source = writer.source
    yield from source.spaces()
    yield from source.expect(OPEN_CALL)
    while True:
        attributes = yield from _read_attributes(writer)
        writer.begin(attributes.get("tool", ""))
        yield from _read_body(writer)
        yield from source.spaces()
        if not (yield from source.skip(OPEN_CALL)):
            return (yield from read_end(writer, CLOSE_TOOLS))


def _read_body(writer: CallWriter) -> Steps[None]:
    source = writer.source
    yield from source.spaces()
    if (yield from source.skip(OPEN_JSON)):
        yield from _read_attributes(writer)
        yield from source.spaces()
        yield from read_object(source, JSON, writer.say)
        writer.close()
        yield from read_end(writer, CLOSE_JSON)
        return (yield from read_end(writer, CLOSE_CALL))
    while (yield from source.expect(OPEN_ARGUMENT, CLOSE_CALL)) == OPEN_ARGUMENT:
        yield from _read_argument(writer)
        yield from source.spaces()
    return writer.close_keys()


def _read_argument(writer: CallWriter) -> Steps[None]:
    """Read an argument. Its type is that of the schema, else the one the model wrote."""
    attributes = yield from _read_attributes(writer)
    if "key" not in attributes:
        raise BrokenError
    writer.key(attributes["key"])
    kinds = kinds_of(writer.schema, attributes["key"])
    if kinds:
        yield from read_text(writer, _ARGUMENT, kinds)
    elif attributes.get("type", "string") == "string":
        yield from stream_text(writer, CLOSE_ARGUMENT, Trim.NOTHING, ())
    else:
        text, _ = yield from writer.source.until(CLOSE_ARGUMENT)
        writer.say(transcode(text, JSON) or quote(text))


def _read_attributes(writer: CallWriter) -> Steps[dict[str, str]]:
    text, _ = yield from writer.source.until(SEPARATOR, characters_max=HEAD_CHARACTERS_MAX)
    return {name: _unescaped(value) for name, value in _ATTRIBUTE.findall(text)}


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
