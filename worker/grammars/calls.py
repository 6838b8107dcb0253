"""Grammars of tool calls, in the format that each model was trained on. Pure.

The formats are those of upstream's parsers (`mlx_lm.tool_parsers`). A model without one, or with one that
cannot be expressed as a grammar, uses the Hermes format: `<tool_call>` with JSON.

In formats with a marker for each argument, such as XML tags, strings are written verbatim up to their end
marker, all other values as JSON. An argument that may be a string or another type, except null, is JSON too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llguidance import regex_to_lark

from worker.grammars import lark
from worker.grammars.references import Schema, SchemaError, resolved, within
from worker.grammars.schema import Relaxation, checked
from worker.output.calls.tagged import ARG_KEY, ATEM, FUNCTION, INVOKE, LONGCAT, PARAM, Tags

MORE_CALLS_MAX = 31
"""Maximum number of calls after the first: a small model might continue forever."""
_SECTIONS = {"kimi_k2", "kimi_k3", "minimax_m2", "muse_spark", "deepseek_v3", "deepseek_v31", "json_list"}
"""Formats with all calls between one pair of markers."""

HEADERS: Mapping[str, tuple[str, str]] = {
    "deepseek_v3": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "harmony": ("{} <|constrain|>json<|message|>", ""),
    "mistral": ("{}[ARGS]", ""),
}
"""Texts before and behind the object of a call's arguments, by format. `{}`: the tool's name."""

Spacing = Callable[[str, str, str], str]
"""Returns the white space of the model's template between two texts, or the third argument if unknown."""

_KNOWN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_SAID = {"title", "description", "$schema", "$id", "$comment", "examples", "default", "$anchor"}
_OF_STRINGS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"} | _SAID
_NAME = re.compile(r"[^<>\"'\s]+")
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_ARGUMENTS_MAX = 32
_EDGES = r"\S|\S(?s:.)*\S"


@dataclass(frozen=True, slots=True)
class MarkupStyle:
    """How a model writes the tags of its format around a call's arguments, an argument's name, and its value.

    `tags`: those that the reader of calls searches for. `ends`: other texts that no string may contain.
    `breaks`: a line break follows the head of a call, and each value. `is_begun`: the marker of calls is the
    opening tag up to the name. `trims`: the parser strips white space around strings. `quotes`: strings are
    JSON too, because the parser infers the type of bare values.
    """

    tags: Tags
    ends: tuple[str, ...] = ()
    breaks: bool = True
    is_begun: bool = False
    trims: bool = True
    quotes: bool = False

    @property
    def key(self) -> tuple[str, str]:
        tags = self.tags
        if not tags.opening:
            return tags.key, tags.key_end
        return (
            (f"{tags.key}=", f"{tags.key_end}\n")
            if tags.lines
            else (f'{tags.key} name="', f'"{tags.key_end}')
        )

    @property
    def value(self) -> tuple[str, str]:
        return self.tags.value, "\n" * self.tags.lines + self.tags.value_end + "\n" * self.breaks

    @property
    def never(self) -> tuple[str, ...]:
        return (self.tags.value_end, self.tags.end, *self.ends)

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after a call's arguments."""
        tags = self.tags
        if not tags.opening:
            return name, ""
        named = name if tags.lines else f'"{name}"' if tags.opening.endswith("=") else f' name="{name}"'
        head = f"{named}{tags.key_end}" + "\n" * self.breaks
        return (head, "") if self.is_begun else (tags.opening + head, tags.end)


_GLM = MarkupStyle(ARG_KEY, breaks=False)
STYLES: Mapping[str, MarkupStyle] = {
    "qwen3_coder": MarkupStyle(FUNCTION, ("</tool_call>",), trims=False),
    "minimax_m2": MarkupStyle(INVOKE, ("</minimax:tool_call>",)),
    "minicpm5": MarkupStyle(PARAM, ("<param ",), breaks=False, is_begun=True),
    "muse_spark": MarkupStyle(ATEM, ("</atem:",), quotes=True),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": MarkupStyle(LONGCAT, breaks=False),
}


@dataclass(slots=True)
class ArgumentsGrammar:
    """Grammar of one tool's arguments. `any`: all valid combinations; `some`: those with at least one
    argument, if the tool has any."""

    any: str = ""
    some: str = ""
    may_be_empty: bool = True
    rules: dict[str, str] = field(default_factory=dict)


class _Writer:
    def __init__(
        self,
        root: Schema,
        style: MarkupStyle,
        marked: Callable[[str], str],
        gaps: tuple[str, str, str],
        relaxation: Relaxation | None,
    ) -> None:
        self.rules: dict[str, str] = {}
        self._relaxation = relaxation
        self._root = root
        self._style = style
        self._marked = marked
        self._gaps = gaps

    def argument(self, name: str, key: str, schema: object) -> str:
        """Return the rule of one argument. `name`: of its value's rule; `key`: a literal or a terminal."""
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
            whole = _whole(within(self._root, schema))
            self.rules[name] = lark.value(whole, lenient=self._relaxation is not None)
            return f"{name} {self._marked(closing)}"
        string, terminal = bare if isinstance(bare, dict) else {}, name.upper()
        choices = _choices(string)
        if choices is not None:
            return f"({' | '.join(map(lark.literal, choices))}) {self._marked(closing)}"
        may_be_null = bare is not schema or not string
        text = " & ".join(self._parts(string, may_be_null=may_be_null))
        ending = self._marked(closing)
        if "<[" in ending:  # it ends with a special token, which never matches text
            self.rules[terminal] = f"{text} & /(?s:.)+/"
            is_needed = "minLength" in string or "pattern" in string
            return f"{terminal}{'' if is_needed else '?'} {ending}"
        self.rules[terminal] = f"({text}) {lark.literal(closing)}"
        self.rules[f"{name}[lazy]"] = terminal
        return name

    def _parts(self, schema: Mapping[str, Any], *, may_be_null: bool) -> list[str]:
        """Return the patterns that the string must match, all of them."""
        never = "|".join(map(lark.escaped, self._style.never))
        parts = [r"/(?s:.)*/", f"~/(?s:.)*({never})(?s:.)*/"]
        if not may_be_null:
            parts.append("~/[nN][uU][lL][lL]/")  # parsers read it as null, whatever the schema says
        if pattern := schema.get("pattern"):
            parts += self._pattern(str(pattern))
        fewest, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if fewest or most != "":
            parts.append(f"/(?s:.){{{fewest},{most}}}/")
        if self._style.trims and len(parts) > 2 + (not may_be_null):
            parts.append(f'({lark.regex(_EDGES)} | "")')
        return parts

    def _pattern(self, pattern: str) -> list[str]:
        try:
            return [lark.regex(_searched(pattern))]
        except SchemaError as error:
            if self._relaxation is None:
                raise
            self._relaxation.keywords.add(error.keyword)
            return []


def parameters(
    schema: Schema,
    style: MarkupStyle,
    spacing: Callable[[str, str, str], str],
    marked: Callable[[str], str],
    name: str,
    relaxation: Relaxation | None,
) -> ArgumentsGrammar:
    """Return the grammar of a tool's arguments. Raises `SchemaError` for what the format cannot express.

    `relaxation`: drop that, and record it there; None: refuse it.
    """
    schema = _expressible(schema, relaxation)
    writer = _Writer(schema, style, marked, _gaps(style, spacing), relaxation)
    listed, required = schema.get("properties") or {}, [*schema.get("required", [])]
    described = ArgumentsGrammar(rules=writer.rules, may_be_empty=not required)
    if "properties" not in schema and not required and schema.get("additionalProperties") is not False:
        writer.rules[f"{name}k"] = lark.regex(_KEY)
        one = writer.argument(f"{name}v", f"{name}k", {})
        described.any, described.some = (
            f"({one}){{0,{_ARGUMENTS_MAX}}}",
            f"({one}){{1,{_ARGUMENTS_MAX}}}",
        )
        return described
    parts = []
    for number, key in enumerate(_names(schema)):
        one = writer.argument(f"{name}v{number}", lark.literal(key), listed.get(key, {}))
        parts.append((one, key in required))
    described.any = " ".join(one if is_required else f"({one})?" for one, is_required in parts)
    described.some = _some([one for one, _ in parts]) if described.may_be_empty else described.any
    return described


def _expressible(schema: Schema, relaxation: Relaxation | None) -> Schema:
    """Return a tool's schema without what the format cannot express at its top level."""
    keywords = sorted(schema.keys() - _KNOWN - _SAID)
    if "properties" not in schema and schema.get("additionalProperties", True) not in (True, False, {}):
        keywords.append("additionalProperties")
    names = [name for name in _names(schema) if not _NAME.fullmatch(name)]
    if relaxation is None and (keywords or names):
        what = f"'{keywords[0]}' at its top level" if keywords else f"the name {names[0]!r} in 'properties'"
        raise SchemaError(f"has {what}, which this model's tool-call format cannot express")
    if relaxation is None:
        return schema
    for keyword in keywords:
        schema = relaxation.drop(schema, keyword)
    if names:
        relaxation.keywords.add("properties")
        listed = {name: part for name, part in (schema.get("properties") or {}).items() if name not in names}
        required = [name for name in schema.get("required", []) if name not in names]
        schema = schema | {"properties": listed, "required": required}
    return schema


def _names(schema: Schema) -> list[str]:
    return [*dict.fromkeys([*(schema.get("properties") or {}), *schema.get("required", [])])]


def _some(optional: list[str]) -> str:
    """Return a rule for at least one of the optional arguments, in order."""
    options = [
        " ".join([one, *(f"({later})?" for later in optional[place + 1 :])])
        for place, one in enumerate(optional)
    ]
    return f"({' | '.join(options)})" if options else ""


def _gaps(style: MarkupStyle, spacing: Callable[[str, str, str], str]) -> tuple[str, str, str]:
    """Return the white space before an argument, between its name and value, and behind it."""
    if not style.value[0]:
        return "", "", ""
    between = spacing(style.key[1], style.value[0], "")
    behind = spacing(style.value[1], style.key[0], "")
    return spacing("probe_tool", style.key[0], behind), between, ""


def _without_null(schema: object) -> object:
    """Return a nullable schema without null, and any other schema unchanged."""
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
    """Convert a JSON Schema pattern, which may match anywhere, to one that matches a whole string."""
    body = pattern.removeprefix("^")
    is_first, body = body != pattern, body
    is_last = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if is_last else body
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", body)
    if re.search(r"[\^$]", plain) or ((is_first or is_last) and _has_alternatives(plain)):
        raise SchemaError(
            f"has a 'pattern' with anchors that this model's tool-call format cannot express: {pattern!r}",
            "pattern",
        )
    anything = "(?s:.)*"
    body = regex_to_lark(f"(?:{body})", "dw")
    return f"{'' if is_first else anything}{body}{'' if is_last else anything}"


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern has alternatives outside of groups."""
    depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            return True
    return False


def _whole(schema: object) -> Schema:
    return schema if isinstance(schema, dict) else {}


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool. `parameters`: schema of its arguments; None: any object."""

    name: str
    parameters: object = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema as a mapping; empty if the client sent something else."""
        return self.parameters if isinstance(self.parameters, Mapping) else {}


@dataclass(frozen=True, slots=True)
class CallForm:
    """Tool-call format of one model. `names`: its special tokens. `lead`: what is before the first marker."""

    kind: str | None
    start: str = "<tool_call>"
    end: str = "</tool_call>"
    names: Mapping[str, int] = field(default_factory=dict)
    spacing: Spacing = lambda _left, _right, default: default
    lead: str = ""


class CallsGrammar:
    """Grammar of calls to the given tools. Raises `SchemaError`, which names the tool.

    `relaxation`: of the schemas of tools that are not in `strict`; None: of none.
    """

    def __init__(
        self,
        form: CallForm,
        tools: Sequence[ToolSchema],
        relaxation: Relaxation | None = None,
        strict: Collection[str] = (),
    ) -> None:
        self._form = form
        self._marked = partial(lark.marked, names=form.names)
        self._style = STYLES.get(form.kind or "")
        self._rules: dict[str, str] = {}
        for number, tool in enumerate(tools):
            try:
                loose = None if tool.name in strict else relaxation
                self._rules[f"call{number}"] = self._call(tool, f"a{number}", loose)
            except SchemaError as error:
                raise SchemaError(f"of the tool '{tool.name}' {error}", error.keyword) from None
        self._rules["call"] = " | ".join(f"call{number}" for number in range(len(tools)))

    def required(self, *, single: bool) -> str:
        """Return the grammar of a whole answer: one call, or several unless `single`."""
        form = self._form
        rest = self._rest(self._marked(form.start), single=single or form.kind == "harmony")  # a call ends it
        return lark.grammar(f"{self._marked(form.lead + form.start)} {rest}", self._written())

    def behind(self, *, single: bool) -> str:
        """Return the grammar between the marker that begins a call and the one that ends it."""
        return lark.grammar(self._rest("", single=single), self._written())

    def _rest(self, again: str, *, single: bool) -> str:
        """Return the rule behind the first marker. `again`: the marker, if repeated with each call."""
        before, between, after = (self._marked(text) for text in self._frame())
        one = f"{before} call"
        if not self._is_section:
            more = f"{between} {again} {one} {after}"
            return (
                f"{one} {after}" if single or not again else f"{one} {after} ({more}){{0,{MORE_CALLS_MAX}}}"
            )
        return f"{one} {after}" if single else f"{one} ({between} call){{0,{MORE_CALLS_MAX}}} {after}"

    @property
    def _is_section(self) -> bool:
        return self._form.kind in _SECTIONS or (self._form.kind == "mistral" and not self._has_header)

    @property
    def _has_header(self) -> bool:
        return "[ARGS]" in self._form.names

    def _frame(self) -> tuple[str, str, str]:
        """Return the texts before a call, between two calls, and behind a call."""
        form, space = self._form, self._form.spacing
        match form.kind:
            case "mistral":
                return ("", "", "") if self._has_header else ("[", ", ", "]")
            case "json_list":
                return "[", ", ", "]" + form.end
            case "kimi_k2" | "kimi_k3" | "harmony" | "deepseek_v3" | "deepseek_v31":
                return "", "", form.end
            case "glm47" | "laguna" | "longcat":
                return "", space(form.end, form.start, ""), form.end
            case "minicpm5":
                return "", space(form.end, form.start, ""), form.end
            case "minimax_m2" | "muse_spark":
                return "\n", "\n", "\n" + form.end
            case "qwen3_coder":
                return "\n", space(form.end, form.start, "\n"), "\n" + form.end
        return (
            space(form.start, "{", "\n"),
            space(form.end, form.start, "\n"),
            space("}", form.end, "\n") + form.end,
        )

    def _call(self, tool: ToolSchema, name: str, relaxation: Relaxation | None) -> str:
        schema = checked(_of_object(tool.parameters), relaxation)
        if self._style is not None:
            return self._written_out(tool, schema, self._style, name, relaxation)
        self._rules[name] = lark.value({"type": "object"} | schema, lenient=relaxation is not None)
        before, after = self._around_json(tool)
        return f"{before} {name} {after}"

    def _around_json(self, tool: ToolSchema) -> tuple[str, str]:
        marked, quoted = self._marked, lark.literal(tool.name)
        kind = self._form.kind or ""
        if kind in HEADERS and (kind != "mistral" or self._has_header):
            before, after = HEADERS[kind]
            return marked(before.replace("{}", tool.name)), marked(after)
        match kind:
            case "kimi_k2":
                begin = f"{marked('<|tool_call_begin|>')} {lark.literal(f'functions.{tool.name}:')}"
                middle = f"/[0-9]{{1,3}}/ {marked('<|tool_call_argument_begin|>')}"
                return f"{begin} {middle}", marked("<|tool_call_end|>")
            case "kimi_k3":
                begin = f"{marked('<|open|>')} {lark.literal(f'call tool={quoted} index=')}"
                header = f'{begin} /"[0-9]{{1,3}}"/ {marked("<|sep|>")}'
                block = marked('<|open|>json type="object"<|sep|>')
                return f"{header} {block}", marked("<|close|>json<|sep|><|close|>call<|sep|>")
        name, comma, arguments = lark.escaped(quoted), ", ?", '"arguments": ?'
        return lark.regex(rf'\{{ ?"name": ?{name}{comma}{arguments}'), '"}"'

    def _written_out(
        self, tool: ToolSchema, schema: Schema, style: MarkupStyle, name: str, relaxation: Relaxation | None
    ) -> str:
        """Return the rule of a call with a marker for each argument."""
        opening, closing = style.around(tool.name)
        described = parameters(schema, style, self._form.spacing, self._marked, name, relaxation)
        self._rules |= described.rules
        bare = f'{{"name": {lark.literal(tool.name)}, "arguments": {{}}}}'
        # In LongCat's format a name alone is not a call.
        if self._form.kind == "longcat" and described.may_be_empty:
            some = f"{self._marked(opening)} {described.some} {self._marked(closing)}"
            return f"{lark.literal(bare)} | {some}" if described.some else lark.literal(bare)
        return f"{self._marked(opening)} {described.any} {self._marked(closing)}"

    def _written(self) -> str:
        return "\n".join(_lines(self._rules)) + "\n"


def _of_object(schema: object) -> object:
    return {"type": "object"} if schema is None or schema is True else schema


def _lines(rules: Mapping[str, str]) -> Iterator[str]:
    for name, body in rules.items():
        yield f"{name}: {body}"
