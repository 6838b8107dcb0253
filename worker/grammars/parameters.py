"""A tool's arguments in the forms that mark each of them, as XML does. Pure.

Strings stand as they are, up to the marker that ends them; all else is JSON. An argument that may be a string
and something else besides, null excepted, is JSON too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from worker.grammars import lark
from worker.grammars.schema import Schema, SchemaError, resolved, within

_KNOWN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_SAID = {"title", "description", "$schema", "$id", "$comment", "examples", "default", "$anchor"}
_OF_STRINGS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"} | _SAID
_NAME = re.compile(r"[^<>\"'\s]+")
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_MORE_MAX = 32
_EDGES = r"\S|\S(?s:.)*\S"


@dataclass(frozen=True, slots=True)
class Style:
    """The marks of one form, around a call's arguments, an argument's name, its value. `{}`: the tool's name.

    `never`: what no string may have in it. `trims`: white space around a string is lost to its reader.
    `quotes`: strings are JSON as well, for their reader guesses what is none.
    """

    call: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str] = ("", "")
    never: tuple[str, ...] = ()
    trims: bool = True
    quotes: bool = False

    def around(self, name: str) -> tuple[str, str]:
        """What stands around a call's arguments."""
        return self.call[0].replace("{}", name), self.call[1]


def _tagged(prefix: str) -> Style:
    key, value, call = (f"{prefix}{part}" for part in ("arg_key", "arg_value", "tool_call"))
    return Style(
        call=("{}", ""),
        key=(f"<{key}>", f"</{key}>"),
        value=(f"<{value}>", f"</{value}>"),
        never=(f"</{value}>", f"</{call}>"),
    )


_GLM = _tagged("")
STYLES: Mapping[str, Style] = {
    "qwen3_coder": Style(
        call=("<function={}>\n", "</function>"),
        key=("<parameter=", ">\n"),
        value=("", "\n</parameter>\n"),
        never=("</parameter>", "</function>", "</tool_call>"),
        trims=False,
    ),
    "minimax_m2": Style(
        call=('<invoke name="{}">\n', "</invoke>"),
        key=('<parameter name="', '">'),
        value=("", "</parameter>\n"),
        never=("</parameter>", "</invoke>", "</minimax:tool_call>"),
    ),
    "minicpm5": Style(
        call=('"{}">', ""),
        key=('<param name="', '">'),
        value=("", "</param>"),
        never=("</param>", "</function>", "<param "),
    ),
    "muse_spark": Style(
        call=('<atem:invoke name="{}">\n', "</atem:invoke>"),
        key=('<atem:parameter name="', '">'),
        value=("", "</atem:parameter>\n"),
        never=("</atem:",),
        quotes=True,
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _tagged("longcat_"),
}


@dataclass(slots=True)
class Described:
    """The arguments of one tool. `any`: as many as there must be; `some`: at least one, if there is one."""

    any: str = ""
    some: str = ""
    may_be_empty: bool = True
    rules: dict[str, str] = field(default_factory=dict)


class _Writer:
    def __init__(
        self, root: Schema, style: Style, marked: Callable[[str], str], gaps: tuple[str, str, str]
    ) -> None:
        self.rules: dict[str, str] = {}
        self._root = root
        self._style = style
        self._marked = marked
        self._gaps = gaps

    def argument(self, name: str, key: str, schema: object) -> str:
        """One, by the number of its rule; `key` is a text, or a terminal."""
        before, between, behind = self._gaps
        opening, closing = self._style.key
        head = (
            f"{self._marked(before + opening)} {key} {self._marked(closing + between + self._style.value[0])}"
        )
        return f"{head} {self._value(name, schema, self._style.value[1] + behind)}"

    def _value(self, name: str, schema: object, closing: str) -> str:
        schema = resolved(schema, self._root)
        bare = _without_null(schema)
        if self._style.quotes or not _is_string(bare):
            self.rules[name] = lark.value(_whole(within(self._root, schema)))
            return f"{name} {self._marked(closing)}"
        string, terminal = bare if isinstance(bare, dict) else {}, name.upper()
        choices = _choices(string)
        if choices is not None:
            return f"({' | '.join(map(lark.literal, choices))}) {self._marked(closing)}"
        may_be_null = bare is not schema or not string
        text = " & ".join(self._parts(string, may_be_null=may_be_null))
        ending = self._marked(closing)
        if "<[" in ending:  # a special token ends it, and no text is that
            self.rules[terminal] = f"{text} & /(?s:.)+/"
            is_needed = "minLength" in string or "pattern" in string
            return f"{terminal}{'' if is_needed else '?'} {ending}"
        self.rules[terminal] = f"({text}) {lark.literal(closing)}"
        self.rules[f"{name}[lazy]"] = terminal
        return name

    def _parts(self, schema: Mapping[str, Any], *, may_be_null: bool) -> list[str]:
        """Patterns that the string fits, all of them."""
        never = "|".join(map(lark.escaped, self._style.never))
        parts = [r"/(?s:.)*/", f"~/(?s:.)*({never})(?s:.)*/"]
        if not may_be_null:
            parts.append("~/[nN][uU][lL][lL]/")  # is null to its reader, whatever is asked for
        if pattern := schema.get("pattern"):
            parts.append(lark.regex(_searched(str(pattern))))
        fewest, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if fewest or most != "":
            parts.append(f"/(?s:.){{{fewest},{most}}}/")
        if self._style.trims and len(parts) > 2 + (not may_be_null):
            parts.append(f'({lark.regex(_EDGES)} | "")')
        return parts


def parameters(
    schema: Schema,
    style: Style,
    spacing: Callable[[str, str, str], str],
    marked: Callable[[str], str],
    name: str,
) -> Described:
    """As a grammar. Raises `SchemaError` for what this form has no place for."""
    if unknown := sorted(schema.keys() - _KNOWN - _SAID):
        raise SchemaError(f"has '{unknown[0]}' at its top, for which this model's form of calls has no place")
    writer = _Writer(schema, style, marked, _gaps(style, spacing))
    listed, required = schema.get("properties") or {}, [*schema.get("required", [])]
    described = Described(rules=writer.rules, may_be_empty=not required)
    if "properties" not in schema and not required:
        writer.rules[f"{name}k"] = lark.regex(_KEY)
        one = writer.argument(f"{name}v", f"{name}k", {})
        described.any, described.some = f"({one}){{0,{_MORE_MAX}}}", f"({one}){{1,{_MORE_MAX}}}"
        return described
    parts = []
    for number, key in enumerate([*listed, *(key for key in required if key not in listed)]):
        if not _NAME.fullmatch(key):
            raise SchemaError(
                f"has in 'properties' the name {key!r}, for which this form of calls has no place"
            )
        one = writer.argument(f"{name}v{number}", lark.literal(key), listed.get(key, {}))
        parts.append((one, key in required))
    described.any = " ".join(one if is_required else f"({one})?" for one, is_required in parts)
    described.some = _some([one for one, _ in parts]) if described.may_be_empty else described.any
    return described


def _some(optional: list[str]) -> str:
    """At least one of these, in order."""
    options = [
        " ".join([one, *(f"({later})?" for later in optional[place + 1 :])])
        for place, one in enumerate(optional)
    ]
    return f"({' | '.join(options)})" if options else ""


def _gaps(style: Style, spacing: Callable[[str, str, str], str]) -> tuple[str, str, str]:
    """White space before an argument, within it, and behind it."""
    if not style.value[0]:
        return "", "", ""
    between = spacing(style.key[1], style.value[0], "")
    behind = spacing(style.value[1], style.key[0], "")
    return spacing("probe_tool", style.key[0], behind), between, ""


def _without_null(schema: object) -> object:
    """What else it may be, where it may be null."""
    if not isinstance(schema, dict):
        return schema
    kinds = schema.get("type")
    if isinstance(kinds, list) and "null" in kinds and len(kinds) == 2:
        return schema | {"type": next(kind for kind in kinds if kind != "null")}
    options = schema.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options and len(options) == 2:
        return next((option for option in options if option != {"type": "null"}), schema)
    return schema


def _is_string(schema: object) -> bool:
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, dict) or schema.keys() - _OF_STRINGS:
        return False
    if schema.keys() & {"enum", "const"}:
        return _choices(schema) is not None
    return schema.get("type") == "string" or not schema.keys() - _SAID


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return values


def _searched(pattern: str) -> str:
    """For a whole string, a pattern that JSON Schema looks for anywhere in it."""
    body = pattern.removeprefix("^")
    is_first, body = body != pattern, body
    is_last = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if is_last else body
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", body)
    if re.search(r"[\^$]", plain) or ((is_first or is_last) and _has_alternatives(plain)):
        raise SchemaError(
            f"has a 'pattern' with anchors that this form of calls has no place for: {pattern!r}"
        )
    anything = "(?s:.)*"
    body = regex_to_lark(f"(?:{body})", "dw")
    return f"{'' if is_first else anything}{body}{'' if is_last else anything}"


def _has_alternatives(pattern: str) -> bool:
    """Outside of all groups."""
    depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            return True
    return False


def _whole(schema: object) -> Schema:
    return schema if isinstance(schema, dict) else {}
