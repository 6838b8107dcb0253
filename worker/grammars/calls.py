"""Calls of tools as grammars, each in the form that its model was trained to write. Pure.

The forms are those of upstream's parsers (`mlx_lm.tool_parsers`), which read what is generated here; a model
whose form cannot be written as a grammar, or that has none, calls as Hermes does: `<tool_call>`, JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.grammars import lark
from worker.grammars.parameters import STYLES, Style, parameters
from worker.grammars.schema import Schema, SchemaError, checked

MORE_MAX = 31
"""How many calls may follow the first: a small model might go on for ever."""
_SECTIONS = {"kimi_k2", "kimi_k3", "minimax_m2", "muse_spark"}
"""Forms that put all calls between one pair of markers."""

Spacing = Callable[[str, str, str], str]
"""The white space that the model's template has between two texts, or else what comes third."""


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the schema of its arguments; None: any object."""

    name: str
    parameters: object = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """As an object, whatever a client has sent."""
        return self.parameters if isinstance(self.parameters, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Form:
    """How one model calls. `names`: its special tokens."""

    kind: str | None
    start: str = "<tool_call>"
    end: str = "</tool_call>"
    names: Mapping[str, int] = field(default_factory=dict)
    spacing: Spacing = lambda _left, _right, default: default


class Calls:
    """The grammar of calls of some tools. Raises `SchemaError`, which names the tool."""

    def __init__(self, form: Form, tools: Sequence[Tool]) -> None:
        self._form = form
        self._marked = partial(lark.marked, names=form.names)
        self._style = STYLES.get(form.kind or "")
        self._rules: dict[str, str] = {}
        for number, tool in enumerate(tools):
            try:
                self._rules[f"call{number}"] = self._call(tool, f"a{number}")
            except SchemaError as error:
                raise SchemaError(f"of the tool '{tool.name}' {error}") from None
        self._rules["call"] = " | ".join(f"call{number}" for number in range(len(tools)))

    def required(self, *, single: bool) -> str:
        """A whole answer: a call, or several unless `single`."""
        start = self._marked(self._form.start)
        return lark.grammar(f"{start} {self._rest(start, single=single)}", self._written())

    def behind(self, *, single: bool) -> str:
        """What follows the marker that begins a call, up to the one that ends it."""
        return lark.grammar(self._rest("", single=single), self._written())

    def _rest(self, again: str, *, single: bool) -> str:
        """Behind the first marker. `again`: the marker, where it is to come again with each call."""
        before, between, after = (self._marked(text) for text in self._frame())
        one = f"{before} call"
        if not self._is_section:
            more = f"{between} {again} {one} {after}"
            return f"{one} {after}" if single or not again else f"{one} {after} ({more}){{0,{MORE_MAX}}}"
        return f"{one} {after}" if single else f"{one} ({between} call){{0,{MORE_MAX}}} {after}"

    @property
    def _is_section(self) -> bool:
        return self._form.kind in _SECTIONS or (self._form.kind == "mistral" and not self._has_header)

    @property
    def _has_header(self) -> bool:
        return "[ARGS]" in self._form.names

    def _frame(self) -> tuple[str, str, str]:
        """What stands before a call, between two, and behind one."""
        form, space = self._form, self._form.spacing
        match form.kind:
            case "mistral":
                return ("", "", "") if self._has_header else ("[", ", ", "]")
            case "kimi_k2" | "kimi_k3":
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

    def _call(self, tool: Tool, name: str) -> str:
        schema = checked(_of_object(tool.parameters))
        if self._style is not None:
            return self._written_out(tool, schema, self._style, name)
        arguments = f"{name}: {lark.value({'type': 'object'} | schema)}"
        self._rules[name] = arguments.removeprefix(f"{name}: ")
        before, after = self._around_json(tool)
        return f"{before} {name} {after}"

    def _around_json(self, tool: Tool) -> tuple[str, str]:
        marked, quoted = self._marked, lark.literal(tool.name)
        match self._form.kind:
            case "mistral" if self._has_header:
                return marked(f"{tool.name}[ARGS]"), ""
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

    def _written_out(self, tool: Tool, schema: Schema, style: Style, name: str) -> str:
        """With a marker for each argument."""
        opening, closing = style.around(tool.name)
        described = parameters(schema, style, self._form.spacing, self._marked, name)
        self._rules |= described.rules
        bare = f'{{"name": {lark.literal(tool.name)}, "arguments": {{}}}}'
        # A name alone is no call of LongCat's.
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
