"""Tool calls with each argument as text between tags; the tool's schema determines its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from worker.output.calls.literals import JSON, LOOSE_JSON, Dialect, escape, quote, read_object, transcode
from worker.output.calls.schemas import NULLS, guessed, kinds_of, typed
from worker.output.calls.source import CLOSINGS, BrokenError, Steps
from worker.output.calls.writer import CallWriter

HEAD_CHARACTERS_MAX = 512
"""Maximum length of a tag's name and attributes, or of a key."""
_ATTRIBUTE = re.compile(r"""\b(?:name|tool|key)\s*=\s*(?:"([^"]*)|'([^']*)|([^\s"'<>]+))""")
_ASSIGNED = re.compile(r"^\s*(?:<?param(?:eter)?\b)?\s*(?:name\s*)?=")
_DECLARED = re.compile(r"""\b(?:type="string"|string="true")""")
_CDATA = ("<![CDATA[", "]]>")
_STRING = frozenset(["string"])
_TEXTUAL = frozenset(["string", "null"])
_NULL = ("null",)


def unquoted(text: str) -> str:
    """Strip white space, quotes and equal signs."""
    return text.strip(" \t\r\n=\"'")


def attribute(text: str) -> str:
    """Return the name among a tag's attributes; empty: none."""
    found = _ATTRIBUTE.search(text)
    return "".join(found.groups("")).replace("&quot;", '"').replace("&amp;", "&") if found else ""


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format: `<opening>…<key>…<key_end> … <value>…<value_end>`, repeated until `end`."""

    opening: str
    key: str
    key_end: str
    """It ends the head of the opening tag, too."""
    value_end: str
    """Empty: the tag of an argument is its name."""
    end: str
    value: str = ""
    lines: bool = False
    """The template puts a line break on either side of a value, which is no part of it. All else is."""
    guesses: bool = False
    """Infer any type for arguments without one in the schema; otherwise only lists, objects and text."""
    has_cdata: bool = False
    may_quote: bool = False
    """Strings may be quoted as in JSON."""
    box: tuple[str, str] = ("", "")
    """Tags around arguments that are one JSON object."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that are searched for."""
        parts = (self.opening, self.end, self.key, self.key_end, self.value, self.value_end, *self.box)
        return tuple(filter(None, parts))

    @property
    def name_in(self) -> Callable[[str], str]:
        """Return the function that finds the name in the head of a tag."""
        return unquoted if not self.opening or self.opening.endswith("=") else attribute

    def key_in(self, head: str) -> str:
        """Return the name of an argument."""
        return attribute(head) if self.name_in is attribute else unquoted(_ASSIGNED.sub("", head))

    @property
    def next(self) -> tuple[str, ...]:
        """What may come behind an argument, and what may wrongly come before it."""
        return tuple(filter(None, (self.end, self.opening, self.box[0], self.key)))

    @property
    def scraps(self) -> tuple[str, ...]:
        """What may come between arguments by mistake: ends of tags a second time."""
        return tuple(filter(None, (self.value_end, self.key_end, ">")))


FUNCTION = Tags("<function=", "<parameter", ">", "</parameter>", "</function>", lines=True)
PARAM = Tags("<function name=", "<param", ">", "</param>", "</function>", has_cdata=True)
INVOKE = Tags("<invoke name=", "<parameter", ">", "</parameter>", "</invoke>")
NAMED = Tags("<invoke name=", "<", ">", "", "</invoke>", guesses=True)
DSML = Tags(
    "<｜DSML｜invoke", "<｜DSML｜parameter", ">", "</｜DSML｜parameter>", "</｜DSML｜invoke>", guesses=True,
)  # fmt: skip
ATEM = Tags(
    "<atem:invoke", "<atem:parameter", ">", "</atem:parameter>", "</atem:invoke>",
    guesses=True, may_quote=True,
)  # fmt: skip
ARG_KEY = Tags("", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>", guesses=True)
LONGCAT = Tags(
    "", "<longcat_arg_key>", "</longcat_arg_key>", "</longcat_arg_value>", "</longcat_tool_call>",
    "<longcat_arg_value>", guesses=True,
)  # fmt: skip
XTML = Tags(
    "<|open|>call", "<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
    guesses=True, box=("<|open|>json", "<|close|>json<|sep|>"),
)  # fmt: skip


def read_name(
    writer: CallWriter, *ends: str, name_in: Callable[[str], str] = unquoted
) -> Steps[tuple[str, str]]:
    """Read the name of a known tool; return it and the literal that ended it. Raises `BrokenError` once no
    tool fits, before more text is waited for."""
    text = ""
    while True:
        more, end = yield from writer.source.part(*ends)
        text += more
        if end and writer.has_parameter(name := name_in(text)):
            return name, end
        is_impossible = name_in is unquoted and not writer.may_know(unquoted(text))
        if end or is_impossible or len(text) > HEAD_CHARACTERS_MAX:
            raise BrokenError


def read_end(writer: CallWriter, *ends: str) -> Steps[None]:
    """Consume the ends of a call and its section, as far as they come next."""
    for end in filter(None, ends):
        yield from writer.source.spaces()
        if (yield from writer.source.skip(end)):
            writer.source.take()


def read_body(writer: CallWriter, *ends: str, dialect: Dialect = LOOSE_JSON) -> Steps[None]:
    """Read a call's arguments that are one object, and its ends."""
    yield from writer.source.spaces()
    yield from read_object(writer.source, dialect, writer.say)
    writer.close()
    yield from read_end(writer, *ends)


def read_tagged(writer: CallWriter, tags: Sequence[Tags], end: str, opening: str = "") -> Steps[None]:
    """Read one or more calls, and the end of their section. `opening`: the one that was consumed."""
    source = writer.source
    by_opening = {each.opening: each for each in tags}
    opening = opening or (yield from source.find(*by_opening, scraps=tags[0].scraps))
    if opening not in by_opening:
        raise BrokenError
    while opening in by_opening:
        yield from read_call(writer, by_opening[opening])
        opening = yield from source.find(*by_opening)
    yield from read_end(writer, end)


def read_call(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call behind its opening tag: name, arguments, end."""
    source = writer.source
    ends = (">", "<") if tags.opening.endswith("=") else (tags.key_end,)
    name, end = yield from read_name(writer, *ends, name_in=tags.name_in)
    if end == "<":
        source.back()
    writer.begin(name)
    yield from source.skip('"')
    yield from read_arguments(writer, tags)


def read_arguments(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read all arguments, up to the end of the call. They may also be one JSON object."""
    source = writer.source
    while True:
        found = yield from source.find(*tags.next, scraps=tags.scraps)
        if found == tags.end:
            return writer.close_keys()
        if found == tags.key:
            yield from _read_argument(writer, tags)
        elif writer.keys:
            raise BrokenError
        elif found == "{":
            return (yield from read_body(writer, tags.box[1], tags.end))
        elif found == tags.opening:  # the opening tag twice
            again, _ = yield from read_name(writer, tags.key_end, name_in=tags.name_in)
            if again != writer.name:
                raise BrokenError
            source.take()
        elif found == tags.box[0]:
            yield from source.until(tags.key_end, characters_max=HEAD_CHARACTERS_MAX)
        else:
            raise BrokenError


def _read_head(writer: CallWriter, tags: Tags) -> Steps[str]:
    """Read the opening tag of an argument behind its beginning."""
    ends = (tags.key_end, "\n") if tags.lines else (tags.key_end,)
    head, end = yield from writer.source.until(*ends, characters_max=HEAD_CHARACTERS_MAX)
    if end == "\n" and (yield from writer.source.find(">")) != ">":
        writer.source.back()
    return head


def _read_argument(writer: CallWriter, tags: Tags) -> Steps[None]:
    source = writer.source
    head = yield from _read_head(writer, tags)
    key = tags.key_in(head)
    if tags.value:
        while (yield from source.skip("\\n")) or (yield from source.spaces()):
            pass
        yield from source.expect(tags.value)
    if not key:
        raise BrokenError
    writer.key(key)
    kinds = kinds_of(writer.schema, key)
    if not kinds and _DECLARED.search(head):
        kinds = _STRING
    if tags.has_cdata and (yield from source.look(source.find(_CDATA[0]))) in ("", _CDATA[0]):
        yield from source.find(_CDATA[0])
        yield from _read_cdata(writer, tags, kinds)
    elif tags.value_end:
        yield from read_text(writer, tags, kinds)
    else:
        yield from read_text(writer, replace(tags, value_end=f"</{head.split()[0]}>"), kinds)


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
    the call follows is a part of the value, as in code that is about such tags. So is the beginning of an
    argument, unless the tool has one of its name that was not given yet: then the end is missing."""
    source = writer.source
    text, end = yield from source.part(tags.value_end, *([tags.key] if tags.key != "<" else []))
    if text or not end:
        if end:
            source.back()  # what comes behind it may break the call: the text before it is certain
        return text, False
    if end == tags.key:
        source.back()
        is_over = yield from source.look(_opens_argument(writer, tags))
        if not is_over:
            yield from source.skip(tags.key)
    else:
        ends = (tags.end, tags.key, *CLOSINGS)
        is_over = (yield from source.look(source.find(*ends, scraps=tags.scraps))) in ("", *ends)
    return ("" if is_over else end), is_over


def _opens_argument(writer: CallWriter, tags: Tags) -> Steps[bool]:
    yield from writer.source.skip(tags.key)
    try:
        key = tags.key_in((yield from _read_head(writer, tags)))
    except BrokenError:
        if writer.source.has_ended:
            raise
        return False  # too long
    return key not in writer.keys and kinds_of(writer.schema, key) is not None


def _read_cdata(writer: CallWriter, tags: Tags, kinds: frozenset[str] | None) -> Steps[None]:
    text, _ = yield from writer.source.until(_CDATA[1])
    yield from writer.source.spaces()
    yield from writer.source.expect(tags.value_end)
    writer.say(typed(text, kinds or _STRING))
