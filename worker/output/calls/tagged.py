"""Tool calls with each argument as text between tags; the tool's schema determines its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from worker.output.calls.literals import JSON, LOOSE_JSON, escape, quote, read_object, transcode
from worker.output.calls.schemas import NULLS, guessed, kinds_of, typed
from worker.output.calls.source import BrokenError, Steps
from worker.output.calls.writer import CallWriter

HEAD_CHARACTERS_MAX = 512
"""Maximum length of a tag's name and attributes, or of a key."""
_NAME = re.compile(r"""\bname\s*=\s*("[^"]*"|'[^']*'|[^\s"'<>]+)""")
_CDATA = ("<![CDATA[", "]]>")
_STRING = frozenset(["string"])
_TEXTUAL = frozenset(["string", "null"])
_NULL = ("null",)
_EDGE = re.compile(r"[ \t\r\n]*\Z")


class Trim(Enum):
    """White space around a value that belongs to the format: none, a line break on either side, or all."""

    NOTHING = 0
    LINES = 1
    SPACES = 2


def unquoted(text: str) -> str:
    """Strip white space and quotes from a name."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def attribute(text: str) -> str:
    """Return the `name` among a tag's attributes; empty: none."""
    found = _NAME.search(text)
    return unquoted(found[1]) if found else ""


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format: `<key>…<key_end> … <value>…<value_end>`, repeated until `end`."""

    key: str
    key_end: str
    value_end: str
    end: str
    value: str = ""
    trim: Trim = Trim.SPACES
    guesses: bool = False
    """Infer any type for arguments without one in the schema; otherwise only lists, objects and text."""
    name_in: Callable[[str], str] = unquoted
    has_cdata: bool = False
    may_quote: bool = False
    """Strings may be quoted as in JSON."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that are searched for."""
        return (self.key, self.key_end, self.value, self.value_end, self.end)


FUNCTION = Tags("<parameter=", ">", "</parameter>", "</function>", trim=Trim.LINES)
INVOKE = Tags("<parameter name=", ">", "</parameter>", "</invoke>")
PARAM = Tags("<param name=", ">", "</param>", "</function>", has_cdata=True)
ATEM = Tags(
    "<atem:parameter", ">", "</atem:parameter>", "</atem:invoke>",
    guesses=True, name_in=attribute, may_quote=True,
)  # fmt: skip
ARG_KEY = Tags("<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>", guesses=True)
LONGCAT = Tags(
    "<longcat_arg_key>", "</longcat_arg_key>", "</longcat_arg_value>", "</longcat_tool_call>",
    "<longcat_arg_value>", guesses=True,
)  # fmt: skip


def read_name(
    writer: CallWriter, *ends: str, name_in: Callable[[str], str] = unquoted
) -> Steps[tuple[str, str]]:
    """Read a tool's name; return it and the literal that ended it. Raises `BrokenError` once no tool fits."""
    text = ""
    while True:
        more, end = yield from writer.source.part(*ends)
        text += more
        if end:
            return name_in(text), end
        begins = text.lstrip().removeprefix('"').removeprefix("'").rstrip("\"' \t\r\n")
        if len(text) > HEAD_CHARACTERS_MAX or (name_in is unquoted and not writer.may_know(begins)):
            raise BrokenError


def read_end(writer: CallWriter, end: str) -> Steps[None]:
    """Consume the end of a section, if it comes next."""
    yield from writer.source.spaces()
    if (yield from writer.source.skip(end)):
        writer.source.take()


def read_call(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call behind its opening tag: name, arguments, end. The arguments may also be one JSON object."""
    name, _ = yield from read_name(writer, ">", name_in=tags.name_in)
    writer.begin(name)
    yield from writer.source.spaces()
    if (yield from writer.source.peek()) == "{":
        yield from read_object(writer.source, LOOSE_JSON, writer.say)
        writer.close()
        yield from read_end(writer, tags.end)
    else:
        yield from read_arguments(writer, tags)


def read_arguments(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read all arguments, up to the end of the call."""
    source = writer.source
    while True:
        yield from source.spaces()
        if (yield from source.expect(tags.key, tags.end)) == tags.end:
            writer.close_keys()
            return
        yield from read_argument(writer, tags)


def read_argument(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read an argument behind its opening tag."""
    source = writer.source
    head, _ = yield from source.until(tags.key_end, characters_max=HEAD_CHARACTERS_MAX)
    key = tags.name_in(head)
    if tags.value:
        while (yield from source.skip("\\n")) or (yield from source.spaces()):
            pass
        yield from source.expect(tags.value)
    writer.key(key)
    if tags.has_cdata and (yield from source.ahead()) == "<" and (yield from _skips_cdata(writer)):
        yield from _read_cdata(writer, tags, kinds_of(writer.schema, key))
    else:
        yield from read_text(writer, tags, kinds_of(writer.schema, key))


def read_text(writer: CallWriter, tags: Tags, kinds: frozenset[str] | None) -> Steps[None]:
    """Read a value, up to the end of its tag. `kinds`: the result of `kinds_of`."""
    nulls = NULLS if kinds and "null" in kinds else () if kinds else _NULL
    if kinds:
        streams = kinds <= _TEXTUAL and "string" in kinds
    else:
        ahead = "" if kinds is None else (yield from writer.source.ahead())
        streams = not tags.guesses and ahead not in ("{", "[")
    if streams and tags.may_quote and (yield from writer.source.ahead()) == '"':
        streams = False
    if streams:
        yield from stream_text(writer, tags.value_end, tags.trim, nulls)
    else:
        text, _ = yield from writer.source.until(tags.value_end)
        writer.say(_valued(_trimmed(text, tags.trim), tags, kinds))


def _valued(text: str, tags: Tags, kinds: frozenset[str] | None) -> str:
    if not kinds:
        return guessed(text)
    if tags.may_quote and kinds <= _TEXTUAL and text.startswith('"'):
        return transcode(text, JSON) or quote(text)
    return typed(text, kinds)


def stream_text(writer: CallWriter, value_end: str, trim: Trim, nulls: Sequence[str]) -> Steps[None]:
    """Stream a string, unless it is one of `nulls`. White space that may have to be trimmed is withheld."""
    source = writer.source
    held, end = "", ""
    if trim is Trim.SPACES:
        yield from source.spaces()
    elif trim is Trim.LINES:
        yield from source.skip("\n")
    while not end and any(null.startswith(held.strip().lower()) for null in nulls):
        more, end = yield from source.part(value_end)
        held += more
    if end and held.strip().lower() in nulls:
        return writer.say("null")
    writer.say('"', but=0 if end else len(held))
    while not end:
        text = held.removesuffix(_edge(held, trim))
        held = held[len(text) :]
        writer.say(escape(text), but=len(held))
        more, end = yield from source.part(value_end)
        held += more
    return writer.say(escape(held.removesuffix(_edge(held, trim))) + '"')


def _edge(text: str, trim: Trim) -> str:
    """Return the end of a value that `trim` would remove."""
    match trim:
        case Trim.NOTHING:
            return ""
        case Trim.LINES:
            return "\n" if text.endswith("\n") else ""
        case Trim.SPACES:
            found = _EDGE.search(text)
            return found[0] if found else ""


def _trimmed(text: str, trim: Trim) -> str:
    match trim:
        case Trim.NOTHING:
            return text
        case Trim.LINES:
            return text.removeprefix("\n").removesuffix("\n")
        case Trim.SPACES:
            return text.strip(" \t\r\n")


def _skips_cdata(writer: CallWriter) -> Steps[str]:
    yield from writer.source.spaces()
    return (yield from writer.source.skip(_CDATA[0]))


def _read_cdata(writer: CallWriter, tags: Tags, kinds: frozenset[str] | None) -> Steps[None]:
    text, _ = yield from writer.source.until(_CDATA[1])
    yield from writer.source.spaces()
    yield from writer.source.expect(tags.value_end)
    writer.say(typed(text, kinds or _STRING))
