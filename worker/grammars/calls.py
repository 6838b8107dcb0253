"""Grammars of tool calls, in the format that each model was trained on. Pure.

The formats are those of upstream's parsers (`mlx_lm.tool_parsers`). A model without one, or with one that
cannot be expressed as a grammar, uses the Hermes format: `<tool_call>` with JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.grammars import lark
from worker.grammars.parameters import STYLES, MarkupStyle, parameters
from worker.grammars.schema import Schema, SchemaError, checked

MORE_MAX = 31
"""Maximum number of calls after the first: a small model might continue forever."""
_SECTIONS = {"kimi_k2", "kimi_k3", "minimax_m2", "muse_spark"}
"""Formats with all calls between one pair of markers."""

Spacing = Callable[[str, str, str], str]
"""Returns the white space of the model's template between two texts, or the third argument if unknown."""


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
    """Tool-call format of one model. `names`: its special tokens."""

    kind: str | None
    start: str = "<tool_call>"
    end: str = "</tool_call>"
    names: Mapping[str, int] = field(default_factory=dict)
    spacing: Spacing = lambda _left, _right, default: default


class CallsGrammar:
    """Grammar of calls to the given tools. Raises `SchemaError`, which names the tool."""

    def __init__(self, form: CallForm, tools: Sequence[ToolSchema]) -> None:
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
        """Return the grammar of a whole answer: one call, or several unless `single`."""
        start = self._marked(self._form.start)
        return lark.grammar(f"{start} {self._rest(start, single=single)}", self._written())

    def behind(self, *, single: bool) -> str:
        """Return the grammar between the marker that begins a call and the one that ends it."""
        return lark.grammar(self._rest("", single=single), self._written())

    def _rest(self, again: str, *, single: bool) -> str:
        """Return the rule behind the first marker. `again`: the marker, if repeated with each call."""
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
        """Return the texts before a call, between two calls, and behind a call."""
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

    def _call(self, tool: ToolSchema, name: str) -> str:
        schema = checked(_of_object(tool.parameters))
        if self._style is not None:
            return self._written_out(tool, schema, self._style, name)
        arguments = f"{name}: {lark.value({'type': 'object'} | schema)}"
        self._rules[name] = arguments.removeprefix(f"{name}: ")
        before, after = self._around_json(tool)
        return f"{before} {name} {after}"

    def _around_json(self, tool: ToolSchema) -> tuple[str, str]:
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

    def _written_out(self, tool: ToolSchema, schema: Schema, style: MarkupStyle, name: str) -> str:
        """Return the rule of a call with a marker for each argument."""
        opening, closing = style.around(tool.name)
        described = parameters(schema, style, self._form.spacing, self._marked, name)
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
