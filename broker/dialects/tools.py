"""Tools: what a body says of them -> what the template is shown, and how they may be called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from protocol.errors import Code, RequestError
from protocol.parts import Calling

NAME_CHARACTERS_MAX = 256


class FunctionTool(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """Tools of other types than function (a client's own web search, say) are tolerated and not offered."""

    type: str | None = "function"
    function: FunctionTool | None = None

    @property
    def is_function(self) -> bool:
        return self.type in (None, "function")


class Named(Struct):
    name: str


class Reference(Struct):
    """A tool, by its name."""

    type: str | None = "function"
    function: Named | None = None
    name: str | None = None


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[Reference]


class Choice(Reference):
    """The one tool to be called or, of type `allowed_tools`, those that may be."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | Choice


@dataclass(frozen=True, slots=True)
class Offer:
    """`tools`: what the template is shown. `calling`: how they are called; None: freely."""

    tools: list[dict[str, Any]]
    calling: Calling | None = None


class Wish(NamedTuple):
    """How a client wants functions to be called. `allowed`: the names of those that may be; None: all."""

    allowed: frozenset[str] | None = None
    required: bool = False
    name: str = ""


def offer(tools: Sequence[Tool], choice: ToolChoice | None, *, single: bool) -> Offer:
    """What is offered of a client's tools. `single`: at most one call is wanted.

    Raises `RequestError` naming the parameter at fault.
    """
    functions = list(_functions(tools))
    return grant(functions, _wish(choice, frozenset(f.name for f in functions)), single=single)


def grant(functions: Sequence[FunctionTool], wish: Wish, *, single: bool) -> Offer:
    """What is offered of `functions`. Raises `RequestError` where a call is asked for and none can be had."""
    offered = [f for f in functions if wish.allowed is None or f.name in wish.allowed]
    if wish.required and not offered:
        message = "'tool_choice' asks for a call, and there are no 'tools' that could be called."
        raise RequestError(Code.INVALID_REQUEST, message, param="tool_choice")
    calling = Calling(
        required=wish.required,
        name=wish.name,
        single=single or bool(wish.name),  # a tool that is named is called once, as OpenAI has it
        strict=[function.name for function in offered if function.strict],
    )
    return Offer([_shown(f) for f in offered], calling if offered and calling != Calling() else None)


def _functions(tools: Sequence[Tool]) -> Iterator[FunctionTool]:
    for index, tool in enumerate(tools):
        if not tool.is_function:
            continue
        param = f"tools[{index}].function"
        if tool.function is None:
            raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required.", param=param)
        if not 1 <= len(tool.function.name) <= NAME_CHARACTERS_MAX:
            message = f"'{param}.name' must have 1 to {NAME_CHARACTERS_MAX} characters."
            raise RequestError(Code.INVALID_REQUEST, message, param=f"{param}.name")
        yield tool.function


def _wish(choice: ToolChoice | None, known: frozenset[str]) -> Wish:
    match choice:
        case "none":
            return Wish(allowed=frozenset())
        case "required":
            return Wish(required=True)
        case Choice(type="allowed_tools"):
            return _allowed(choice.allowed_tools, known)
        case Choice():
            return Wish(required=True, name=_name("tool_choice", choice, known))
        case _:
            return Wish()


def _allowed(allowed: AllowedTools | None, known: frozenset[str]) -> Wish:
    param = "tool_choice.allowed_tools"
    if allowed is None:
        raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required.", param=param)
    names = frozenset(
        _name(f"{param}.tools[{index}]", tool, known)
        for index, tool in enumerate(allowed.tools)
        if tool.type in (None, "function")
    )
    return Wish(allowed=names, required=allowed.mode == "required")


def _name(param: str, tool: Reference, known: frozenset[str]) -> str:
    """Raises `RequestError` for what is none of the request's functions."""
    if tool.type not in (None, "function"):
        message = f"'{param}.type' can be 'function' here; tools of other types are not called."
        raise RequestError(Code.INVALID_REQUEST, message, param=f"{param}.type")
    param, name = (
        (f"{param}.function.name", tool.function.name) if tool.function else (f"{param}.name", tool.name)
    )
    if name is None:
        raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required.", param=param)
    if name not in known:
        message = f"'{param}' is {name[:64]!r}, and there is no such function among the 'tools'."
        raise RequestError(Code.INVALID_REQUEST, message, param=param)
    return name


def _shown(function: FunctionTool) -> dict[str, Any]:
    fields = {"description": function.description, "parameters": function.parameters}
    present = {name: field for name, field in fields.items() if field is not None}
    return {"type": "function", "function": {"name": function.name, **present}}
