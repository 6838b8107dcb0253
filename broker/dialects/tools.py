"""Tools and `tool_choice` of a body -> tools for the chat template, and the tool-call constraint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from broker.dialects.body import is_too_deep, wrong
from protocol.types import ToolCallConstraint

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
INPUT = "input"
"""Name of the only argument of a custom tool."""
CALLABLE = (None, "function", "custom")


class FunctionTool(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(Struct):
    """Input format of a tool. `type`: `text` means no grammar."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None
    grammar: Grammar | None = None
    """In chat, where syntax and definition are one level deeper."""


class CustomTool(Struct):
    """A tool with free text as input, offered as a function with one string."""

    name: ToolName
    description: str | None = None
    format: Grammar | None = None

    def function(self) -> FunctionTool:
        """Return the function that is offered for the tool."""
        description = self.description or ""
        form = "The whole input, as free text."
        grammar = self.format and (self.format.grammar or self.format)
        if grammar and grammar.definition:
            form = f"The whole input, as text of this {grammar.syntax or 'lark'} grammar:\n"
            form += grammar.definition
        argument = {"type": "string", "description": form}
        parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT]}
        return FunctionTool(self.name, description or None, parameters)


class Tool(Struct):
    """A tool. Types other than these two (such as a search of the server's) are accepted but not offered.

    `strict` may stand here as well as in the function.
    """

    type: str | None = "function"
    function: FunctionTool | None = None
    custom: CustomTool | None = None
    strict: bool | None = None


class Named(Struct):
    name: str


class Reference(Struct):
    """Reference to a tool by its name."""

    type: str | None = "function"
    function: Named | None = None
    custom: Named | None = None
    name: str | None = None


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[Reference]


class Choice(Reference):
    """The tool to call or, with type `allowed_tools`, the tools that may be called."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | Choice


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """`tools`: definitions for the chat template. `late`: those that a message has (`defined`). `calling`:
    constraint on calls; None: unconstrained."""

    tools: list[dict[str, Any]]
    calling: ToolCallConstraint | None = None
    late: list[dict[str, Any]] = field(default_factory=list)


class ToolChoicePolicy(NamedTuple):
    """Normalized `tool_choice`. `allowed`: names of the functions that may be called; None: all."""

    allowed: frozenset[str] | None = None
    required: bool = False
    name: str = ""


def offer(
    tools: Sequence[Tool], choice: ToolChoice | None, *, single: bool, late: Collection[str] = ()
) -> ToolOffer:
    """Return the offer for a client's tools. `single`: allow at most one call. `late`: names of those that a
    message defines.

    Raises `RequestError` naming the parameter at fault.
    """
    functions = list(_functions(tools))
    wish = _wish(choice, frozenset(f.name for f in functions))
    return grant(functions, wish, single=single, late=late)


def grant(
    functions: Sequence[FunctionTool], wish: ToolChoicePolicy, *, single: bool, late: Collection[str] = ()
) -> ToolOffer:
    """Return the offer for `functions`. Raises `RequestError` if a call is required and none is possible."""
    offered = [f for f in functions if wish.allowed is None or f.name in wish.allowed]
    if wish.required and not offered:
        raise wrong("tool_choice", "requires a tool call, but 'tools' has no tool that can be called")
    calling = ToolCallConstraint(
        required=wish.required,
        name=wish.name,
        single=single or bool(wish.name),  # a named tool is called once, as at OpenAI
        strict=[function.name for function in offered if function.strict],
    )
    return ToolOffer(
        [_shown(f) for f in offered if f.name not in late],
        calling if offered and calling != ToolCallConstraint() else None,
        [_shown(f) for f in offered if f.name in late],
    )


def defined(function: FunctionTool) -> str:
    """Return a function's definition as the text of the message behind which it can be called."""
    return msgspec.json.encode(_shown(function)["function"]).decode()


def _functions(tools: Sequence[Tool]) -> Iterator[FunctionTool]:
    for index, tool in enumerate(tools):
        if tool.type not in CALLABLE:
            continue
        offered = tool.custom if tool.type == "custom" else tool.function
        if offered is None:
            raise wrong(f"tools[{index}].{tool.type or 'function'}", "is required")
        if isinstance(offered, CustomTool):
            yield offered.function()
        else:
            yield replace(offered, strict=tool.strict or offered.strict)


def _wish(choice: ToolChoice | None, known: frozenset[str]) -> ToolChoicePolicy:
    match choice:
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case "required":
            return ToolChoicePolicy(required=True)
        case Choice(type="allowed_tools"):
            return _allowed(choice.allowed_tools, known)
        case Choice():
            return ToolChoicePolicy(required=True, name=_name("tool_choice", choice, known))
        case _:
            return ToolChoicePolicy()


def _allowed(allowed: AllowedTools | None, known: frozenset[str]) -> ToolChoicePolicy:
    param = "tool_choice.allowed_tools"
    if allowed is None:
        raise wrong(param, "is required")
    names = frozenset(
        _name(f"{param}.tools[{index}]", tool, known)
        for index, tool in enumerate(allowed.tools)
        if tool.type in CALLABLE
    )
    return ToolChoicePolicy(allowed=names, required=allowed.mode == "required")


def _name(param: str, tool: Reference, known: frozenset[str]) -> str:
    """Return the name in `tool`. Raises `RequestError` if the request has no such function."""
    if tool.type not in CALLABLE:
        raise wrong(f"{param}.type", "must be 'function' or 'custom': tools of other types cannot be called")
    named = tool.custom if tool.type == "custom" else tool.function
    within = f"{param}.{tool.type or 'function'}" if named else param
    param, name = f"{within}.name", named.name if named else tool.name
    if name is None:
        raise wrong(param, "is required")
    if name not in known:
        raise wrong(param, f"is {name[:64]!r}, which is not a function in 'tools'")
    return name


def _shown(function: FunctionTool) -> dict[str, Any]:
    fields = {"description": function.description, "parameters": function.parameters}
    present = {name: field for name, field in fields.items() if field is not None}
    return {"type": "function", "function": {"name": function.name, **present}}


# Calls that broke off: clients must not take them for calls, and run a tool with a part of its arguments.
# A call that `max_tokens` has cut is in the answer with the part that it has, and the finish reason says so,
# as in OpenAI's and Anthropic's APIs. Any other that broke off is text.

_object: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_whole(arguments: str) -> bool:
    """Return whether a call's arguments are a JSON object. They are not if the call broke off."""
    return fields_of(arguments) is not None


def fields_of(arguments: str) -> dict[str, msgspec.Raw] | None:
    """Return a call's arguments by name; None if they are no JSON object."""
    if is_too_deep(arguments.encode(errors="replace")):
        return None
    try:
        return _object.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def as_text(name: str, arguments: str) -> str:
    """Return a call that broke off as the text that clients get instead."""
    quoted: Any = msgspec.json.encode(name).decode()
    return f'{{"name": {quoted}, "arguments": {arguments}'
