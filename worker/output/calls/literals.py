"""Streaming readers of literal values, strict, with JSON output.

JSON is passed through unchanged. Python literals and Gemma's (bare keys, strings between special tokens) are
converted to JSON. The text of strings is emitted as it arrives, other values when they are complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from worker.output.calls.source import BrokenError, CallSource, Spelling, Steps

Emit = Callable[[str], None]

DEPTH_MAX = 64
ATOM_CHARACTERS_MAX = 4096
"""Maximum length of a number, a word or a bare key."""

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ATOM = re.compile(r"[-+.\w]+")
_BARE = re.compile("[^,{}\\[\\]\ud800-\udfff]+")
_KEY = re.compile("[^\\s,:{}\\[\\]\"'<>\ud800-\udfff]+")
_BARE_KEY = re.compile(r"[-$\w]+")
_JSON_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_PYTHON_RUN = re.compile(r"[^\"'\\]+")
_HIGH, _LOW = re.compile("[dD][89abAB].."), re.compile("[dD][c-fC-F]..")
"""Hexadecimal digits of the first and second half of a character."""
_REPLACEMENT = "\\ufffd"
_HEX = re.compile(r"[0-9a-fA-F]")
_OCTAL = re.compile(r"[0-7]")
_INTEGER = re.compile(r"[-+]?(?:0+|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?")

_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = _JSON_WORDS | {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "U": 8}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Syntax of literal values. `words`: constants, with their JSON. `quotes`: opening quotes of Python
    strings, longest first. `delimiter`: encloses strings without escapes. `has_bare_values`: a value that is
    neither a number nor a word is a string. `is_verbatim`: the syntax is JSON and is passed through
    unchanged. `is_loose`: what models botch in JSON is repaired, and valid JSON is still unchanged.
    """

    words: Mapping[str, str]
    quotes: tuple[str, ...] = ()
    delimiter: str = ""
    has_bare_keys: bool = False
    has_bare_values: bool = False
    is_verbatim: bool = False
    is_loose: bool = False
    closings: Mapping[str, str] = field(default_factory=lambda: {"{": "}", "[": "]"})


JSON = Dialect(_JSON_WORDS, is_verbatim=True)
LOOSE_JSON = Dialect(_PYTHON_WORDS, is_verbatim=True, is_loose=True)
"""JSON, with trailing commas, single quotes, bare keys, Python's words and numbers, line breaks in strings,
and backslashes that escape nothing."""
PYTHON = Dialect(_PYTHON_WORDS, quotes=('"""', "'''", '"', "'"), closings={"{": "}", "[": "]", "(": ")"})
"""Python literals, plus JSON's words and escapes. Any string may contain line breaks."""
GEMMA = Dialect(_JSON_WORDS, delimiter='<|"|>', has_bare_keys=True)
FUNCTION_GEMMA = Dialect(_JSON_WORDS, delimiter="<escape>", has_bare_keys=True, has_bare_values=True)


def quote(text: str) -> str:
    """Encode a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Escape a text for use within a JSON string."""
    return quote(text)[1:-1]


def transcode(text: str, dialect: Dialect) -> str | None:
    """Convert a complete value to JSON; None: it is not a value of this dialect."""
    source, said = CallSource(Spelling({})), list[str]()
    source.feed(text)
    source.end(is_whole=True)
    try:
        for _ in _read_whole(source, dialect, said.append):
            raise AssertionError("a reader waits for more text after the end of its source")
    except BrokenError:
        return None
    return "".join(said)


def _read_whole(source: CallSource, dialect: Dialect, emit: Emit) -> Steps[None]:
    yield from source.spaces()
    yield from read_value(source, dialect, emit)
    yield from source.spaces()
    if (yield from source.peek()):
        raise BrokenError


def read_object(source: CallSource, dialect: Dialect, emit: Emit) -> Steps[None]:
    """Read an object. The closing brace is consumed but not emitted, so that an unfinished call is never
    valid JSON."""
    yield from source.expect("{")
    emit("{")
    yield from _read_items(source, dialect, emit, "}", 1)


def read_value(source: CallSource, dialect: Dialect, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read any value."""
    character = yield from source.peek()
    closing = dialect.closings.get(character)
    if closing is None:
        yield from _read_scalar(source, dialect, emit)
    elif depth == DEPTH_MAX:
        raise BrokenError
    elif closing == ")":
        yield from _read_tuple(source, dialect, emit, depth + 1)
    else:
        emit(source.accept())
        yield from _read_items(source, dialect, emit, closing, depth + 1)
        emit(closing)


def _read_items(source: CallSource, dialect: Dialect, emit: Emit, closing: str, depth: int) -> Steps[int]:
    """Read all items up to `closing`, which is consumed but not emitted. Returns their number, negated after
    a trailing comma."""
    count = 0
    while True:
        if not (count and dialect.is_loose):
            yield from _read_spaces(source, dialect, emit)
        elif (yield from _read_comma(source, closing, emit)):
            return -count
        if not (count and dialect.is_verbatim) and (yield from source.skip(closing)):
            return -count
        if count and not dialect.is_verbatim:
            emit(", ")
        if closing == "}":
            yield from _read_key(source, dialect, emit)
        yield from read_value(source, dialect, emit, depth)
        count += 1
        yield from _read_spaces(source, dialect, emit)
        if (yield from source.expect(",", closing)) == closing:
            return count
        if dialect.is_verbatim and not dialect.is_loose:
            emit(",")


def _read_comma(source: CallSource, closing: str, emit: Emit) -> Steps[bool]:
    """Read what follows a comma up to the next item. Return whether none follows: the comma is dropped."""
    spaces = yield from source.spaces()
    if (yield from source.skip(closing)):
        return True
    emit("," + spaces)
    return False


def _read_spaces(source: CallSource, dialect: Dialect, emit: Emit) -> Steps[None]:
    spaces = yield from source.spaces()
    if spaces and dialect.is_verbatim:
        emit(spaces)


def _read_tuple(source: CallSource, dialect: Dialect, emit: Emit, depth: int) -> Steps[None]:
    """Read a tuple, emitted as a list, or a value in parentheses. Only the end decides which it is."""
    source.accept()
    said: list[str] = []
    count = yield from _read_items(source, dialect, said.append, ")", depth)
    text = "".join(said)
    emit(text if count == 1 else f"[{text}]")


def _read_key(source: CallSource, dialect: Dialect, emit: Emit) -> Steps[None]:
    said: list[str] = []
    if dialect.is_loose and (yield from source.peek()) not in ("'", '"'):
        return (yield from _read_bare_key(source, emit))
    if not dialect.has_bare_keys:
        yield from _read_scalar(source, dialect, said.append)
    elif (yield from source.skip(dialect.delimiter)):
        yield from _read_delimited(source, dialect.delimiter, said.append)
    else:
        said.append((yield from source.run(_KEY, ATOM_CHARACTERS_MAX)))
    key = "".join(said)
    if not key or (dialect.is_verbatim and not key.startswith('"')):
        raise BrokenError
    emit(key if key.startswith('"') else quote(key))
    yield from _read_spaces(source, dialect, emit)
    yield from source.expect(":")
    emit(":" if dialect.is_verbatim else ": ")
    return (yield from _read_spaces(source, dialect, emit))


def _read_bare_key(source: CallSource, emit: Emit) -> Steps[None]:
    """Read a key of `LOOSE_JSON` without quotes, and the colon that shows that it is one."""
    key = yield from source.run(_BARE_KEY, ATOM_CHARACTERS_MAX)
    yield from source.spaces()
    if not key:
        raise BrokenError
    yield from source.expect(":")
    yield from source.spaces()
    emit(quote(key) + ": ")


def _read_scalar(source: CallSource, dialect: Dialect, emit: Emit) -> Steps[None]:
    if dialect.delimiter and (yield from source.skip(dialect.delimiter)):
        yield from _read_delimited(source, dialect.delimiter, emit)
    elif dialect.quotes and (opening := (yield from source.skip(*dialect.quotes))):
        yield from read_python_string(source, opening, emit)
    elif not dialect.quotes and (yield from source.skip('"')):
        yield from read_json_string(source, emit, is_loose=dialect.is_loose)
    elif dialect.is_loose and (yield from source.skip("'")):
        yield from read_python_string(source, "'", emit)
    elif dialect.has_bare_values:
        text = yield from source.run(_BARE, ATOM_CHARACTERS_MAX)
        emit(_atom(text.strip(), dialect) or quote(text))
    else:
        atom = _atom((yield from source.run(_ATOM, ATOM_CHARACTERS_MAX)), dialect)
        if atom is None:
            raise BrokenError
        emit(atom)


def _atom(text: str, dialect: Dialect) -> str | None:
    if text in dialect.words:
        return dialect.words[text]
    if NUMBER.fullmatch(text):
        return text if math.isfinite(float(text)) else quote(text)  # 1e999, which no client could send back
    return python_number(text) if dialect.quotes or dialect.is_loose else None


def python_number(text: str) -> str | None:
    """Convert a number in Python syntax to JSON; None: it is not a number, or not finite."""
    try:
        if _INTEGER.fullmatch(text):
            return str(int(text))
        if text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b"):
            return str(int(text, 0))
        number = float(text) if _FLOAT.fullmatch(text) else math.nan
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) and not text.lstrip("+-").isdigit() else None


def read_json_string(source: CallSource, emit: Emit, *, is_loose: bool = False) -> Steps[None]:
    """Read a JSON string whose opening quote was consumed."""
    emit('"')
    while True:
        if run := source.match(_JSON_RUN):
            emit(run)
        character = yield from source.peek()
        if character == '"':
            emit(source.accept())
            return
        if character == "\\":
            yield from _read_json_escape(source, emit, is_loose=is_loose)
        elif is_loose and character:
            emit(escape(source.accept()))  # a control character
        elif not _JSON_RUN.match(character):
            raise BrokenError


def _read_json_escape(source: CallSource, emit: Emit, *, is_loose: bool) -> Steps[None]:
    source.accept()
    letter = yield from source.peek()
    if not letter or (letter not in '"\\/bfnrtu' and not is_loose):
        raise BrokenError
    if letter not in '"\\/bfnrtu':
        return emit("\\\\")  # the letter is read as text
    source.accept()
    return emit((yield from _unicode_escape(source)) if letter == "u" else f"\\{letter}")


def _unicode_escape(source: CallSource) -> Steps[str]:
    """Read the digits of an escape, and those of the other half of a pair, as JSON. A half without the other
    is no character: clients could not send it back in UTF-8."""
    escaped = ""
    digits = yield from _digits(source, 4)
    while _HIGH.fullmatch(digits):
        if not (yield from source.peek()):
            raise BrokenError
        if not (yield from source.skip("\\u")):
            break
        high, digits = digits, (yield from _digits(source, 4))
        if _LOW.fullmatch(digits):
            return f"{escaped}\\u{high}\\u{digits}"
        escaped += _REPLACEMENT
    is_half = _HIGH.fullmatch(digits) or _LOW.fullmatch(digits)
    return escaped + (_REPLACEMENT if is_half else f"\\u{digits}")


def _digits(source: CallSource, count: int) -> Steps[str]:
    text = ""
    while len(text) < count:
        if not _HEX.fullmatch((yield from source.peek())):
            raise BrokenError
        text += source.accept()
    return text


def _read_delimited(source: CallSource, delimiter: str, emit: Emit) -> Steps[None]:
    emit('"')
    end = ""
    while not end:
        text, end = yield from source.part(delimiter)
        emit(escape(text))
    emit('"')


def read_python_string(source: CallSource, closing: str, emit: Emit) -> Steps[None]:
    """Read a Python string whose opening quote was consumed, as JSON. `closing`: its closing quote."""
    emit('"')
    while True:
        if run := source.match(_PYTHON_RUN):
            emit(escape(run))
        character = yield from source.peek()
        if character == closing[0] and (yield from source.skip(closing)):
            break
        if character == "\\":
            source.accept()
            emit((yield from _python_escape(source)))
        elif not character:
            raise BrokenError
        elif character in "'\"":
            emit(escape(source.accept()))
    emit('"')


def _python_escape(source: CallSource) -> Steps[str]:
    """Read the rest of an escape sequence; return its text, escaped for JSON."""
    letter = yield from source.peek()
    if not letter:
        raise BrokenError
    if _OCTAL.match(letter):
        return escape(chr(int((yield from _octal(source)), 8)))
    source.accept()
    if letter == "u":
        return escape(json.loads(f'"{(yield from _unicode_escape(source))}"'))
    if letter in _HEX_DIGITS:
        return _character((yield from _digits(source, _HEX_DIGITS[letter])))
    return escape(_ESCAPES.get(letter, "\\" + letter))


def _octal(source: CallSource) -> Steps[str]:
    text = ""
    while len(text) < 3 and (character := (yield from source.peek())) and _OCTAL.match(character):
        text += source.accept()
    return text


def _character(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise BrokenError
    return _REPLACEMENT if 0xD800 <= code <= 0xDFFF else escape(chr(code))
