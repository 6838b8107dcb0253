"""Conversion of the tools in a responses body to the tool offer.

Functions and, as functions, custom tools are offered. A function in a namespace gets a flat name, since
templates have no namespaces. Tools that the server would have to run, such as web search, are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from broker.dialects.body import convert
from broker.dialects.responses.custom import CustomTool
from broker.dialects.tools import NAME_CHARACTERS_MAX, FunctionTool, ToolChoicePolicy, grant
from protocol.errors import Code, RequestError
from protocol.types import ToolCallConstraint

Described = Mapping[str, Any]


def flat_name(namespace: str | None, name: str) -> str:
    """Join namespace and name, in the form that models trained on such tools write."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class QualifiedName(NamedTuple):
    """A function's namespace and name. An empty namespace means none."""

    namespace: str
    name: str


class _Namespace(Struct):
    name: str
    tools: list[dict[str, Any]] = []


class _Allowed(Struct):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class _Named(Struct):
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesToolOffer:
    """`shown`: definitions for the chat template. `calling`: constraint on calls; None: unconstrained.
    `namespaces`: namespace and name by flat name. `customs`: flat names of the custom tools."""

    shown: list[dict[str, Any]]
    calling: ToolCallConstraint | None
    namespaces: Mapping[str, QualifiedName]
    customs: frozenset[str] = frozenset()


def offer(tools: Sequence[Described], choice: str | Described | None, *, single: bool) -> ResponsesToolOffer:
    """Return the offer. `single`: allow at most one call. Raises `RequestError` naming the parameter."""
    found: dict[str, _Found] = {}
    for one in _found(tools):
        found.setdefault(flat_name(*one.split), one)
    named = [replace(one.function, name=name) for name, one in found.items()]
    granted = grant(named, _wish(choice, found.keys()), single=single)
    namespaces = {name: one.split for name, one in found.items() if one.split.namespace}
    customs = frozenset(name for name, one in found.items() if one.is_custom)
    return ResponsesToolOffer(granted.tools, granted.calling, namespaces, customs)


class _Found(NamedTuple):
    split: QualifiedName
    function: FunctionTool
    is_custom: bool


def _found(tools: Sequence[Described], within: str = "", namespace: str = "") -> Iterator[_Found]:
    for index, tool in enumerate(tools):
        place = f"{within}tools[{index}]"
        match kind := tool.get("type", "function"):
            case "function" | "custom":
                is_custom = kind == "custom"
                function = _custom(tool, place) if is_custom else convert(tool, FunctionTool, place)
                if not 1 <= len(function.name) <= NAME_CHARACTERS_MAX:
                    message = f"'{place}.name' must have 1 to {NAME_CHARACTERS_MAX} characters."
                    raise RequestError(Code.INVALID_REQUEST, message, param=f"{place}.name")
                yield _Found(QualifiedName(namespace, function.name), function, is_custom)
            case "namespace" if not namespace:
                nested = convert(tool, _Namespace, place)
                yield from _found(nested.tools, f"{place}.", nested.name)


def _custom(tool: Described, place: str) -> FunctionTool:
    return convert(tool, CustomTool, place).function()


def _wish(choice: str | Described | None, known: Collection[str]) -> ToolChoicePolicy:
    match choice:
        case None | "auto":
            return ToolChoicePolicy()
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case "required":
            return ToolChoicePolicy(required=True)
        case str():
            raise _unserved()
    match choice.get("type"):
        case "function" | "custom":
            return ToolChoicePolicy(required=True, name=_name("tool_choice", choice, known))
        case "allowed_tools":
            return _allowed(convert(choice, _Allowed, "tool_choice"), known)
        case _:
            raise _unserved()


def _allowed(allowed: _Allowed, known: Collection[str]) -> ToolChoicePolicy:
    names = frozenset(
        _name(f"tool_choice.tools[{index}]", tool, known)
        for index, tool in enumerate(allowed.tools)
        if tool.get("type", "function") in ("function", "custom")
    )
    return ToolChoicePolicy(allowed=names, required=allowed.mode == "required")


def _name(place: str, tool: Described, known: Collection[str]) -> str:
    named = convert(tool, _Named, place)
    if (name := flat_name(named.namespace, named.name)) not in known:
        message = f"'{place}.name' is {name[:64]!r}, which is not a function in 'tools'."
        raise RequestError(Code.INVALID_REQUEST, message, param=f"{place}.name")
    return name


def _unserved() -> RequestError:
    message = "'tool_choice' must be 'auto', 'none', 'required', a function or 'allowed_tools'."
    return RequestError(Code.INVALID_REQUEST, message, param="tool_choice")


def told(tool: Described) -> dict[str, Any]:
    """Return a tool as the response repeats it; functions get all fields that SDK types require."""
    absent = {"description": None, "parameters": None, "strict": None}
    return absent | dict(tool) if tool.get("type", "function") == "function" else dict(tool)
