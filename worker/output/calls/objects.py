"""Tool calls as JSON objects: `{"name": …, "arguments": {…}}`, alone, in sequence, or in a list.

Behind a marker, what models botch in them is repaired (`LOOSE_JSON`), and other names of keys are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from worker.output.calls.literals import (
    ATOM_CHARACTERS_MAX,
    LOOSE_JSON,
    read_json_string,
    read_object,
    read_python_string,
    read_value,
    transcode,
)
from worker.output.calls.source import BrokenError, Steps
from worker.output.calls.writer import CallWriter

UNDECIDED_CHARACTERS_MAX = 8192
"""Maximum text of an object before its call begins. If it is not a call, it is parsed again as text."""
_NAME = "name"
_NAMES_BEHIND_MARKERS = (_NAME, "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_FUNCTION = "function"
"""Key of the whole call, or of its name, behind a marker."""
_ARGUMENTS_BEHIND_MARKERS = (*_ARGUMENTS, "args", "input")
_BARE_KEY = re.compile(r"\w+")
_KEYS_BESIDE = ("type", "id", "tool_call_id")
"""Other keys that are ignored. Any further key breaks the call: it could be something the tool needs."""


class _TextBuffer:
    """Buffer of text that is not yet known to belong to a call. `fits`: checks it as it grows."""

    def __init__(self, fits: Callable[[str], bool] = lambda _: True) -> None:
        self.text = ""
        self._fits = fits

    def add(self, text: str) -> None:
        """Append text. Raises `BrokenError` if it does not fit, or beyond `UNDECIDED_CHARACTERS_MAX`."""
        self.text += text
        if len(self.text) > UNDECIDED_CHARACTERS_MAX or not self._fits(self.text):
            raise BrokenError


def read_objects(writer: CallWriter, closing: str = "", *, is_bare: bool = False) -> Steps[None]:
    """Read one or more calls, in sequence or up to the `closing` of a list whose opening was consumed.
    `is_bare`: there is no marker, so each must look like a call from its start to its arguments."""
    source, found = writer.source, "{"
    while found in ("{", ","):
        yield from source.spaces()
        yield from _Object(writer, is_bare=is_bare).read()
        if not closing:
            yield from source.find(";")  # Llama 3, between several
        found = (yield from source.find(",", closing)) if closing else (yield from source.ahead())
    if closing and found != closing:
        raise BrokenError
    if closing:
        source.take()


class _Object:
    """Reader of one call."""

    def __init__(self, writer: CallWriter, *, is_bare: bool = False) -> None:
        self._writer = writer
        self._is_bare = is_bare
        self._name = ""
        self._has_begun = False
        self._has_arguments = False
        self._held = _TextBuffer()

    def read(self) -> Steps[None]:
        source = self._writer.source
        yield from source.expect("{")
        if not self._is_bare:
            yield from source.find("{")  # as templates of templates write it
        yield from self._read_items()
        if not self._has_begun:
            raise BrokenError
        self._writer.close("}" if self._has_arguments else "{}")

    def _read_items(self) -> Steps[None]:
        """Read keys and values, up to the closing brace."""
        source = self._writer.source
        end = ","
        while end == ",":
            yield from source.spaces()
            if self._has_begun and (yield from source.skip("}")):
                return
            key = yield from self._read_key()
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            yield from self._read_value_of(key)
            yield from source.spaces()
            end = yield from source.expect(",", "}")

    def _read_key(self) -> Steps[str]:
        source = self._writer.source
        if self._is_bare or (yield from source.peek()) in ('"', "'"):
            return (yield from self._read_quoted(_TextBuffer()))
        return (yield from source.run(_BARE_KEY, ATOM_CHARACTERS_MAX))

    def _read_quoted(self, buffer: _TextBuffer) -> Steps[str]:
        """Read a string in either quotes, or up to the name of a call without a marker in JSON's."""
        source = self._writer.source
        quote = yield from source.expect(*('"' if self._is_bare and not self._name else "\"'"))
        said: list[str] = []

        def emit(text: str) -> None:
            said.append(text)
            if not self._has_begun:  # else it may have any length
                buffer.add(text)

        if quote == '"':
            yield from read_json_string(source, emit)
        else:
            yield from read_python_string(source, quote, emit)
        return str(json.loads("".join(said)))

    def _read_value_of(self, key: str) -> Steps[None]:
        names = _ARGUMENTS if self._is_bare else _ARGUMENTS_BEHIND_MARKERS
        if key in ((_NAME,) if self._is_bare else _NAMES_BEHIND_MARKERS) and not self._name:
            yield from self._read_name()
        elif key in names and not self._has_arguments and (self._name or not self._is_bare):
            yield from self._read_arguments()
        elif key in _KEYS_BESIDE:
            yield from read_value(self._writer.source, LOOSE_JSON, _TextBuffer().add)
        elif key == _FUNCTION and not (self._is_bare or self._name):
            if (yield from self._writer.source.skip("{")):
                yield from self._read_items()
            else:
                yield from self._read_name()
        else:
            raise BrokenError

    def _read_name(self) -> Steps[None]:
        writer = self._writer
        fits = _TextBuffer(lambda text: "\\" in text or writer.may_know(text.strip('"')))
        self._name = yield from self._read_quoted(fits)
        if not writer.has_parameter(self._name):
            raise BrokenError
        writer.is_named = True
        if not self._is_bare:
            self._begin()

    def _read_arguments(self) -> Steps[None]:
        source = self._writer.source
        self._has_arguments = True
        match (yield from source.peek()):
            case "{":
                self._begin()
                yield from read_object(source, LOOSE_JSON, self._say)
            case '"' | "'":
                text = yield from self._read_quoted(_TextBuffer())
                arguments = transcode(text.strip(), LOOSE_JSON) or ""
                if not arguments.startswith("{"):
                    raise BrokenError
                self._begin()
                self._say(arguments[:-1])
            case _:
                yield from source.expect("null")
                self._begin()
                self._say("{")

    def _begin(self) -> None:
        """Emit the call, if its name is complete."""
        if self._name and not self._has_begun:
            self._writer.begin(self._name)
            self._has_begun = True
            self._writer.say(self._held.text)

    def _say(self, text: str) -> None:
        if self._has_begun:
            self._writer.say(text)
        else:
            self._held.add(text)
