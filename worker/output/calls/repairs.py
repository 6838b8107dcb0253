"""Repairs of calls that models botch at their edges: repeated markers, closings that are missing or too many.

No value is ever completed or shortened: a call lacks nothing but its closing, or it stays unfinished.
"""

from __future__ import annotations

import json

from worker.output.calls.schemas import fits
from worker.output.calls.source import CLOSINGS, BrokenError, CallSource, Steps
from worker.output.calls.writer import CallWriter, Reader

REPEATS_MAX = 8
"""Maximum number of repeated markers, or of closings in a row; more are text."""
_FENCES = ("```json", "```")
_BRACKETS = "}])"
_PAIRS = {"{": "}", "[": "]"}


def read_repaired(writer: CallWriter, reader: Reader, marker: str) -> Steps[None]:
    """Read all calls behind a marker. `marker`: empty for calls without one."""
    fence = (yield from _skip_repeats(writer.source, marker)) if marker else ()
    closings = (*CLOSINGS, *fence)
    try:
        yield from reader(writer)
    except BrokenError:
        yield from _complete(writer, closings)
    yield from _skip_closings(writer.source, closings)


def closing_of(arguments: str) -> str | None:
    """Return the brackets that complete unfinished JSON; None: it lacks more than these."""
    open_brackets: list[str] = []
    is_string = is_escaped = False
    for character in arguments:
        if is_string:
            is_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            is_string = True
        elif character in _PAIRS:
            open_brackets.append(_PAIRS[character])
        elif character in _PAIRS.values():
            open_brackets.pop()
    closing = "".join(reversed(open_brackets)) if arguments else "{}"
    try:
        json.loads(arguments + closing)
    except ValueError:
        return None
    return closing


def _skip_repeats(source: CallSource, marker: str) -> Steps[tuple[str, ...]]:
    """Skip repetitions of the marker, and a code fence around the calls. Returns the end of the fence."""
    fence: tuple[str, ...] = ()
    for _ in range(REPEATS_MAX):
        found = yield from source.find(marker, *_FENCES, ">", "]")
        if found not in (marker, *_FENCES, ">", "]"):
            break
        fence = ("```",) if found in _FENCES else fence
    return fence


def _complete(writer: CallWriter, closings: tuple[str, ...]) -> Steps[None]:
    """Complete a call that only lacks brackets, if another closing or the end of the answer follows.

    Raises `BrokenError` if it lacks more: an argument that its tool requires, too.
    """
    closing = closing_of(writer.arguments) if writer.is_open else None
    if closing is None or not fits(writer.schema, json.loads(writer.arguments + closing)):
        raise BrokenError
    source = writer.source
    source.rewind()
    yield from _skip_brackets(source)
    found = yield from source.find(*closings, scraps=(">",))
    is_over = not found and source.has_answer_ended and writer.arguments
    if not (found in closings or is_over):
        raise BrokenError
    writer.close(closing)


def _skip_closings(source: CallSource, closings: tuple[str, ...]) -> Steps[None]:
    """Skip closings behind the calls: what is left of brackets, then markers."""
    for _ in range(REPEATS_MAX):
        yield from _skip_brackets(source)
        if not (yield from source.skip(*closings)):
            return
        source.take()


def _skip_brackets(source: CallSource) -> Steps[None]:
    """Skip white space and some closing brackets."""
    yield from source.spaces()
    for _ in range(REPEATS_MAX):
        character = yield from source.peek()
        if not character or character not in _BRACKETS:
            return
        source.accept()
        yield from source.spaces()
