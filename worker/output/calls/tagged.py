"""Tool calls with each argument as text between tags; the tool's schema determines its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.output.calls.literals import JSON, LOOSE_JSON, escape, quote, read_object, transcode
from worker.output.calls.schemas import NULLS, guessed, kinds_of, typed
from worker.output.calls.source import CLOSINGS, BrokenError, Steps
from worker.output.calls.writer import CallWriter

HEAD_CHARACTERS_MAX = 512
"""Maximum length of a tag's name and attributes, or of a key."""
_NAME = re.compile(r"""\bname\s*=\s*("[^"]*"|'[^']*'|[^\s"'<>]+)""")
_CDATA = ("<![CDATA[", "]]>")
_STRING = frozenset(["string"])
_TEXTUAL = frozenset(["string", "null"])
_NULL = ("null",)


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
    lines: bool = False
    """The template puts a line break on either side of a value, which is no part of it. All else is."""
    guesses: bool = False
    """Infer any type for arguments without one in the schema; otherwise only lists, objects and text."""
    name_in: Callable[[str], str] = unquoted
    also: str = ""
    """What models write for `key` by mistake."""
    has_cdata: bool = False
    may_quote: bool = False
    """Strings may be quoted as in JSON."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that are searched for."""
        return (self.key, self.key_end, self.value, self.value_end, self.end)

    @property
    def keys(self) -> tuple[str, ...]:
        """The literals that begin an argument."""
        return (self.key, self.also) if self.also else (self.key,)


FUNCTION = Tags(
    "<parameter=", ">", "</parameter>", "</function>", lines=True, also="<parameter name=",
)  # fmt: skip
INVOKE = Tags("<parameter name=", ">", "</parameter>", "</invoke>", also="<parameter=")
DSML = Tags(
    "<｜DSML｜parameter", ">", "</｜DSML｜parameter>", "</｜DSML｜invoke>", guesses=True, name_in=attribute,
)  # fmt: skip
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


def read_call(writer: CallWriter, tags: Tags, opening: str = "") -> Steps[None]:
    """Read a call behind its opening tag: name, arguments, end. The arguments may also be one JSON object."""
    name, _ = yield from read_name(writer, ">", name_in=tags.name_in)
    writer.begin(name)
    yield from writer.source.spaces()
    if opening and (yield from writer.source.skip(opening)):  # the opening tag twice
        again, _ = yield from read_name(writer, ">", name_in=tags.name_in)
        if again != name:
            raise BrokenError
        writer.source.take()
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
        while (yield from source.skip(tags.value_end)):  # the end of a value twice
            yield from source.spaces()
        if (yield from source.expect(*tags.keys, tags.end)) == tags.end:
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
    if tags.has_cdata and (yield from source.follows(_CDATA[0])):
        yield from source.spaces()
        yield from source.expect(_CDATA[0])
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
        yield from stream_text(writer, tags, nulls)
    else:
        text, is_over = "", False
        while not is_over:
            more, is_over = yield from _read_part(writer, tags)
            text += more
        text = text.removeprefix("\n").removesuffix("\n") if tags.lines else text
        writer.say(_valued(text, tags, kinds))


def _valued(text: str, tags: Tags, kinds: frozenset[str] | None) -> str:
    if not kinds:
        return guessed(text)
    if tags.may_quote and kinds <= _TEXTUAL and text.lstrip().startswith('"'):
        return transcode(text.strip(), JSON) or quote(text)
    return typed(text, kinds)


def stream_text(writer: CallWriter, tags: Tags, nulls: Sequence[str]) -> Steps[None]:
    """Stream a string, unless it is one of `nulls`."""
    held, is_over = "", False
    if tags.lines:
        yield from writer.source.skip("\n")
    while not is_over and any(null.startswith(held.strip().lower()) for null in nulls):
        more, is_over = yield from _read_part(writer, tags)
        held += more
    if is_over and held.strip().lower() in nulls:
        return writer.say("null")
    writer.say('"', but=0 if is_over else len(held))
    while not is_over:
        text = held.removesuffix("\n") if tags.lines else held
        held = held[len(text) :]
        writer.say(escape(text), but=len(held))
        more, is_over = yield from _read_part(writer, tags)
        held += more
    return writer.say(escape(held.removesuffix("\n") if tags.lines else held) + '"')


def _read_part(writer: CallWriter, tags: Tags) -> Steps[tuple[str, bool]]:
    """Read some of a value; return it, and whether it is over. An end that neither an argument nor the end of
    the call follows is a part of the value, as in code that is about such tags."""
    source = writer.source
    text, end = yield from source.part(tags.value_end)
    if text or not end:
        if end:
            source.back()  # what comes behind it may break the call: the text before it is certain
        return text, False
    is_over = yield from source.follows(*tags.keys, tags.value_end, tags.end, *CLOSINGS)
    return ("" if is_over else end), is_over


def _read_cdata(writer: CallWriter, tags: Tags, kinds: frozenset[str] | None) -> Steps[None]:
    text, _ = yield from writer.source.until(_CDATA[1])
    yield from writer.source.spaces()
    yield from writer.source.expect(tags.value_end)
    writer.say(typed(text, kinds or _STRING))
