"""Tool calls that look like code: `[name(key=value)]`, and Gemma's `call:name{key:value}`."""

from __future__ import annotations

import re

from worker.output.calls.literals import ATOM_CHARACTERS_MAX, PYTHON, Dialect, read_object, read_value
from worker.output.calls.objects import read_objects
from worker.output.calls.source import BrokenError, Steps
from worker.output.calls.tagged import read_end, read_name
from worker.output.calls.writer import CallWriter

_WORD = re.compile(r"\w+")


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
    while True:
        yield from _read_call(writer)
        yield from source.spaces()
        if (yield from source.expect(",", "]")) == "]":
            source.take()
            return (yield from read_end(writer, end))


def _read_call(writer: CallWriter) -> Steps[None]:
    """Read a call. It is emitted once it has a keyword argument, or none: positional ones have no name."""
    source = writer.source
    name, _ = yield from read_name(writer, "(")
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
