"""Tool-call formats, by the markers that open them.

These are the formats of upstream's parsers (`mlx_lm.tool_parsers`), and those that models trained on several
formats fall back to. Formats that share a marker are told apart by what follows it.

Calls as JSON objects are `{"name": …, "arguments": {…}}`, alone, in sequence, or in a list. Behind a marker,
what models botch in them is repaired (`LOOSE_JSON`), and other names of keys are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from worker.output.calls.literals import (
    ATOM_CHARACTERS_MAX,
    FUNCTION_GEMMA,
    GEMMA,
    LOOSE_JSON,
    PYTHON,
    Dialect,
    read_json_string,
    read_object,
    read_python_string,
    read_value,
    transcode,
)
from worker.output.calls.source import CLOSINGS, BrokenError, Steps
from worker.output.calls.tagged import (
    ARG_KEY,
    ATEM,
    DSML,
    FUNCTION,
    HEAD_CHARACTERS_MAX,
    INVOKE,
    LONGCAT,
    NAMED,
    PARAM,
    XTML,
    Tags,
    read_arguments,
    read_body,
    read_end,
    read_name,
    read_tagged,
)
from worker.output.calls.writer import CallWriter, Reader

_WORD = re.compile(r"\w+")
_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"

_KIMI_CALL = "<|tool_call_begin|>"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)


# --- a header for the name, followed by one object of arguments ---

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


def read_mistral(writer: CallWriter) -> Steps[None]:
    """Read one or more `name[ARGS]{…}`, or JSON objects as older models write. There is no end marker."""
    source = writer.source
    if (yield from source.ahead()) in ("[", "{"):
        return (yield from read_code(writer))
    while True:
        name, end = yield from read_name(writer, "[CALL_ID]", "[ARGS]", "{")
        if end == "[CALL_ID]":
            yield from source.until("[ARGS]", characters_max=HEAD_CHARACTERS_MAX)
        elif end == "{":
            source.back()
        writer.begin(name)
        yield from read_body(writer)
        yield from source.spaces()


def read_kimi(writer: CallWriter) -> Steps[None]:
    """Read one or more calls of Kimi K2. They keep the model's own ids, which its template renders as call
    names."""
    source = writer.source
    found: str = _KIMI_CALL
    yield from source.find(_KIMI_CALL)
    while found == _KIMI_CALL:
        head, _ = yield from source.until("<|tool_call_argument_begin|>", characters_max=HEAD_CHARACTERS_MAX)
        parts = _KIMI_HEAD.fullmatch(head.strip())
        writer.begin(parts[1] if parts else "", head.strip())
        if (yield from source.find("<|tool_call_end|>")) == "<|tool_call_end|>":
            writer.close("{}")
        else:
            yield from read_body(writer, "<|tool_call_end|>")
        found = yield from source.find(_KIMI_CALL)
    yield from read_end(writer, "<|tool_calls_section_end|>")


def read_deepseek(writer: CallWriter) -> Steps[None]:
    """Read one or more calls of DeepSeek R1 to V3.1: a type and a name, or a name alone, before the
    arguments."""
    source = writer.source
    found: str = _DEEPSEEK_CALL
    yield from source.find(_DEEPSEEK_CALL)
    while found == _DEEPSEEK_CALL:
        head, _ = yield from source.until(_DEEPSEEK_SEPARATOR, characters_max=HEAD_CHARACTERS_MAX)
        name = head.strip()
        if name == "function" and not writer.has_parameter(name):
            name, _ = yield from read_name(writer, "\n", "```", "{")
            source.back()
        writer.begin(name)
        yield from source.find("```json", "```")
        yield from read_body(writer, "```", _DEEPSEEK_END)
        found = yield from source.find(_DEEPSEEK_CALL)
    yield from read_end(writer, "<｜tool▁calls▁end｜>")


_HARMONY_ENDS = ("<|channel|>", "<|constrain|>", "<|message|>", " ")


def read_harmony(writer: CallWriter) -> Steps[None]:
    """Read a call behind its recipient (gpt-oss): what else is in the head of its message, and its object."""
    name, end = yield from read_name(writer, *_HARMONY_ENDS)
    writer.begin(name)
    if end != "<|message|>":
        yield from writer.source.until("<|message|>", characters_max=HEAD_CHARACTERS_MAX)
    yield from read_body(writer, "<|call|>")


def read_gemma(writer: CallWriter, dialect: Dialect, end: str) -> Steps[None]:
    """Read one or more `call:name{key:value}`."""
    source = writer.source
    found = yield from source.find("call:")
    while found == "call:":
        name, _ = yield from read_name(writer, "{")
        source.back()
        writer.begin(name)
        yield from read_body(writer, dialect=dialect)
        found = yield from source.find("call:")
    if not writer.has_begun:
        raise BrokenError
    yield from read_end(writer, end)


# --- calls that look like code: `[name(key=value)]` ---


def read_code(writer: CallWriter, end: str = "", *, is_bare: bool = False) -> Steps[None]:
    """Read calls like code or as JSON objects, in a list or one behind the other. `is_bare`: there is no
    marker."""
    source = writer.source
    yield from source.spaces()
    closing = "]" if (yield from source.skip("[")) else ""
    if (yield from source.ahead()) == "{":
        yield from read_objects(writer, closing, is_bare=is_bare)
    else:
        found = ","
        while found not in ("<", ""):
            yield from source.spaces()
            yield from _read_code_call(writer)
            yield from source.spaces()
            found = (yield from source.expect(",", "]")) if closing else (yield from source.peek())
            if found == closing:
                source.take()
                break
    yield from read_end(writer, end)


def _read_code_call(writer: CallWriter) -> Steps[None]:
    """Read a call. It is emitted once it has a keyword argument, or none: positional ones have no name."""
    source = writer.source
    name, _ = yield from read_name(writer, ".call(", "(")
    writer.is_named = True
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


# --- calls between tags, and those of models trained on several formats ---


def _read_any(writer: CallWriter, tags: Tags, others: Sequence[Tags] = ()) -> Steps[None]:
    """Read objects, tags or a call with a bare name, depending on the first character."""
    match (yield from writer.source.ahead()):
        case "{" | "[":
            yield from read_code(writer, tags.end)
        case "<" if others:
            yield from read_tagged(writer, others, tags.end)
        case _:
            yield from _read_named(writer, tags)


def _read_named(writer: CallWriter, tags: Tags) -> Steps[None]:
    """Read a call that begins with its bare name."""
    yield from writer.source.spaces()
    name, _ = yield from read_name(writer, tags.key, tags.end, "{")
    writer.source.back()
    writer.begin(name)
    yield from read_arguments(writer, tags)


def _read_function_calls(writer: CallWriter) -> Steps[None]:
    is_tagged = (yield from writer.source.ahead()) == "<"
    tagged = partial(read_tagged, tags=[INVOKE])
    yield from (tagged if is_tagged else read_code)(writer, end="</function_calls>")


_SECTIONS = (
    ("<minimax:tool_call>", "</minimax:tool_call>", (INVOKE,)),
    ("<atem:function_calls>", "</atem:function_calls>", (ATEM,)),
    ("<seed:tool_call>", "</seed:tool_call>", (FUNCTION, PARAM)),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", (DSML,)),
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", (DSML,)),
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", (XTML,)),
)
"""What is around calls in tags."""
READERS: Mapping[str, Reader] = {
    "<tool_call>": partial(_read_any, tags=ARG_KEY, others=(FUNCTION, PARAM, NAMED)),
    "<longcat_tool_call>": partial(_read_any, tags=LONGCAT),
    FUNCTION.opening: partial(read_tagged, tags=[FUNCTION], opening=FUNCTION.opening, end="</tool_call>"),
    PARAM.opening: partial(read_tagged, tags=[PARAM], opening=PARAM.opening, end="</tool_call>"),
    INVOKE.opening: partial(read_tagged, tags=[INVOKE], opening=INVOKE.opening, end="</minimax:tool_call>"),
    "[TOOL_CALLS]": read_mistral,
    "<|tool_call>": partial(read_gemma, dialect=GEMMA, end="<tool_call|>"),
    "<start_function_call>": partial(read_gemma, dialect=FUNCTION_GEMMA, end="<end_function_call>"),
    "<|tool_calls_section_begin|>": read_kimi,
    "<|tool_call_begin|>": read_kimi,
    "<｜tool▁calls▁begin｜>": read_deepseek,
    _DEEPSEEK_CALL: read_deepseek,
    "<function_calls>": _read_function_calls,
    "<|tool_call_start|>": partial(read_code, end="<|tool_call_end|>"),
    "<|python_tag|>": read_code,
    "<|python_start|>": partial(read_code, end="<|python_end|>"),  # Llama 4
    "<tools>": read_code,
    "<tool_calls>": read_code,
    "<TOOLCALL>": partial(read_code, end="</TOOLCALL>"),  # Nemotron
    "<|tool_call|>": partial(read_code, end="<|/tool_call|>"),  # Granite 3, Phi-4-mini
    "<|START_ACTION|>": partial(read_code, end="<|END_ACTION|>"),  # Command
    **{start: partial(read_tagged, tags=tags, end=end) for start, end, tags in _SECTIONS},
}
"""Readers by marker."""
read_bare = partial(read_code, is_bare=True)
"""Reads calls without a marker, which begin with one of `BARE`."""
BARE = ("{", "[")


LITERALS = frozenset(
    [
        *READERS,
        *(end for _, end, _ in _SECTIONS),
        *("<tool_call|>", "<end_function_call>", "<|python_end|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
        *(*_HARMONY_ENDS[:-1], "<|call|>"),
        *(_DEEPSEEK_SEPARATOR, _DEEPSEEK_END),
        *("[ARGS]", "[CALL_ID]", GEMMA.delimiter, FUNCTION_GEMMA.delimiter),
        *CLOSINGS,
        *(
            tag
            for tags in (FUNCTION, INVOKE, PARAM, ATEM, ARG_KEY, LONGCAT, DSML, XTML)
            for tag in tags.literals
        ),
    ]
)
"""All literals that readers search for and that may be special tokens of a model."""


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
