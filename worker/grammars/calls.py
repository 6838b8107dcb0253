"""Grammars of tool calls, in the format that each model was trained on. Pure.

The formats are those of upstream's parsers (`mlx_lm.tool_parsers`). A model without one, or with one that
cannot be expressed as a grammar, uses the Hermes format: `<tool_call>` with JSON.

In formats with a marker for each argument, such as XML tags, strings are written verbatim up to their end
marker, all other values as JSON. An argument that may be a string or another type, except null, is JSON too.
The types are those by which the call is read (`worker.output.calls.schemas`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.grammars import lark
from worker.grammars.patterns import searched
from worker.grammars.references import Schema, SchemaError, entries, items, looked_up, resolved, within
from worker.grammars.schema import Relaxation, checked
from worker.output.calls.schemas import DEPTH_MAX, kinds_in, kinds_of
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
_OF_STRINGS = {"pattern", "minLength", "maxLength", "format"} | _SAID
_TEXTUAL = frozenset(("string", "null"))
_NO_TEXT = frozenset(("not", "if"))
"""Keywords for strings that patterns cannot express."""
_NAME = re.compile(r"[^<>\"'\s]+")
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_ARGUMENTS_MAX = 32
_EDGES = r"\S|\S(?s:.)*\S"
_ANY = "/(?s:.)*/"


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


class _Writer:
    """Writer of one tool's arguments, with a marker for each. Raises `SchemaError` if it cannot write them.

    `relaxation`: drop that, and record it there; None: refuse it.
    """

    def __init__(
        self,
        form: CallForm,
        style: MarkupStyle,
        tool: ToolSchema,
        schema: Schema,
        relaxation: Relaxation | None,
    ) -> None:
        self.rules: dict[str, str] = {}
        self._tool = tool
        self._root = _expressible(schema, relaxation)
        self._style = style
        self._marked = partial(lark.marked, names=form.names)
        self._gaps = _gaps(style, form.spacing)
        self._relaxation = relaxation

    def arguments(self, name: str) -> tuple[str, str | None]:
        """Return the rule of all valid combinations, and of those with an argument if none is valid too."""
        schema, required = self._root, [*self._root.get("required", [])]
        if "properties" not in schema and not required and schema.get("additionalProperties") is not False:
            self.rules[f"{name}k"] = lark.regex(_KEY)
            one = self._argument(f"{name}v", f"{name}k", {}, None)
            return f"({one}){{0,{_ARGUMENTS_MAX}}}", f"({one}){{1,{_ARGUMENTS_MAX}}}"
        listed, parts = schema.get("properties") or {}, list[tuple[str, bool]]()
        for number, key in enumerate(_names(schema)):
            kinds = kinds_of(self._tool.schema, key)
            one = self._argument(f"{name}v{number}", lark.literal(key), listed.get(key, {}), kinds)
            parts.append((one, key in required))
        every = " ".join(one if is_required else f"({one})?" for one, is_required in parts)
        return every, None if required else _some([one for one, _ in parts])

    def _argument(self, name: str, key: str, schema: object, kinds: frozenset[str] | None) -> str:
        """Return the rule of one argument. `name`: of its value's rule; `key`: a literal or a terminal;
        `kinds`: the types by which its value is read."""
        before, between, behind = self._gaps
        opening, closing = self._style.key
        head = (
            f"{self._marked(before + opening)} {key} {self._marked(closing + between + self._style.value[0])}"
        )
        return f"{head} {self._value(name, schema, kinds or frozenset(), self._style.value[1] + behind)}"

    def _value(self, name: str, schema: object, kinds: frozenset[str], closing: str) -> str:
        ending = self._marked(closing)
        is_text = kinds <= _TEXTUAL and "string" in kinds if kinds else _is_untyped(schema)
        if self._style.quotes or not is_text:
            whole = within(self._root, resolved(schema, self._root))
            self.rules[name] = lark.value(entries(whole), lenient=self._relaxation is not None)
            return f"{name} {ending}"
        parts, null = self._parts(schema), [lark.literal("null")] * ("null" in kinds)
        if len(parts) == 1 and parts[0].startswith('"'):  # listed texts
            return f"({' | '.join([*parts, *null])}) {ending}"
        text = " & ".join(map(_grouped, [*self._free(bool(parts), bool(kinds) and not null), *parts]))
        text = " | ".join([text, *null])
        terminal = name.upper()
        if "<[" in ending:  # it ends with a special token, which never matches text
            self.rules[terminal] = f"({text}) & /(?s:.)+/"
            return f"{terminal}{'' if parts else '?'} {ending}"
        self.rules[terminal] = f"({text}) {lark.literal(closing)}"
        self.rules[f"{name}[lazy]"] = terminal
        return name

    def _free(self, is_held: bool, is_text: bool) -> Iterator[str]:
        """Yield the patterns of any string. `is_held`: its schema demands something of it. `is_text`: it is
        never null."""
        yield _ANY
        yield f"~/(?s:.)*({'|'.join(map(lark.escaped, self._style.never))})(?s:.)*/"
        if is_text:
            yield "~/[nN][uU][lL][lL]/"  # parsers read it as null, whatever the schema says
        if self._style.trims and is_held:
            yield f'{lark.regex(_EDGES)} | ""'

    def _parts(self, schema: object, depth: int = 0) -> list[str]:
        """Return the patterns that a string must match by its schema, all of them."""
        if depth > DEPTH_MAX:
            raise SchemaError("has a '$ref' to itself in a string", "$ref")
        schema = entries(schema)
        for keyword in _NO_TEXT & schema.keys():
            self._lose(f"has a '{keyword}', which this model's tool-call format cannot express", keyword)
        listed = (_listed({key: schema[key]}) for key in ("const", "enum") if key in schema)
        parts = [" | ".join(map(lark.literal, texts)) for texts in listed]
        if pattern := schema.get("pattern"):
            parts += self._pattern(str(pattern))
        fewest, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if fewest or most != "":
            parts.append(f"/(?s:.){{{fewest},{most}}}/")
        joined = [*items(schema.get("allOf"))]
        if isinstance(schema.get("$ref"), str):
            joined.append(looked_up(schema["$ref"], self._root))
        for one in joined:
            parts += self._parts(one, depth + 1)
        for key in ("anyOf", "oneOf"):
            parts += self._options(key, items(schema.get(key)), depth + 1)
        return parts

    def _options(self, key: str, options: Sequence[object], depth: int) -> list[str]:
        options = [one for one in options if self._may_be_text(one)]
        if key == "oneOf" and not _are_apart(options):
            self._lose("has a 'oneOf' of strings that one may match twice", key)
        found = [self._parts(one, depth) for one in options]
        if len(found) < 2:
            return [part for parts in found for part in parts]
        return [" | ".join(_grouped(" & ".join(map(_grouped, parts)) or _ANY) for parts in found)]

    def _may_be_text(self, schema: object) -> bool:
        kinds = kinds_in(schema, self._root)
        return schema is not False and (not kinds or "string" in kinds)

    def _pattern(self, pattern: str) -> list[str]:
        if (found := searched(pattern)) is not None:
            return [lark.regex(found)]
        what = "with anchors that this model's tool-call format cannot express"
        self._lose(f"has a 'pattern' {what}: {pattern!r}", "pattern")
        return []

    def _lose(self, message: str, keyword: str) -> None:
        """Refuse a keyword, or name it if the schema may be relaxed."""
        if self._relaxation is None:
            raise SchemaError(message, keyword)
        self._relaxation.keywords.add(keyword)


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


def _is_untyped(schema: object) -> bool:
    """Whether a schema without types demands at most something of strings."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _OF_STRINGS)


def _listed(schema: object) -> list[str]:
    """Return the texts that a schema lists."""
    listed = entries(schema)
    values = [listed["const"]] if "const" in listed else items(listed.get("enum"))
    return [value for value in values if isinstance(value, str)]


def _are_apart(options: Sequence[object]) -> bool:
    """Whether no text is listed by two options."""
    texts = [text for option in options for text in _listed(option)]
    return len(options) < 2 or (all(map(_listed, options)) and len(texts) == len({*texts}))


def _grouped(pattern: str) -> str:
    return f"({pattern})"


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
        writer = _Writer(self._form, style, tool, schema, relaxation)
        every, some = writer.arguments(name)
        self._rules |= writer.rules
        if self._form.kind != "longcat" or some is None:
            return f"{self._marked(opening)} {every} {self._marked(closing)}"
        # In LongCat's format a name alone is not a call.
        bare = lark.literal(f'{{"name": {lark.literal(tool.name)}, "arguments": {{}}}}')
        return f"{bare} | {self._marked(opening)} {some} {self._marked(closing)}" if some else bare

    def _written(self) -> str:
        return "\n".join(_lines(self._rules)) + "\n"


def _of_object(schema: object) -> object:
    return {"type": "object"} if schema is None or schema is True else schema


def _lines(rules: Mapping[str, str]) -> Iterator[str]:
    for name, body in rules.items():
        yield f"{name}: {body}"
