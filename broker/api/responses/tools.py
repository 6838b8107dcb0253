"""Conversion of the tools in a responses body, and in its items, to the tool offer.

Functions and, as functions, custom tools and built-in tools that the client runs are offered. A function in a
namespace gets a flat name, since templates have no namespaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from broker.api.responses.builtin_tools import CALL_ITEMS, function_of
from broker.dialects.body import convert, wrong
from broker.dialects.tools import CustomTool, FunctionTool, ToolChoicePolicy, defined, grant
from protocol.errors import RequestError
from protocol.types import ToolCallConstraint

Described = Mapping[str, Any]


class PlacedTools(NamedTuple):
    """Tools. `within`: what stands before `tools` in their place, such as `input[2].`. `is_late`: they
    came behind an answer, where a message defines them."""

    within: str
    tools: Sequence[Described]
    is_late: bool = False


CALLABLE = ("function", "custom", *CALL_ITEMS)
"""Types of tools that are offered as a function."""


def flat_name(namespace: str | None, name: str) -> str:
    """Join namespace and name, in the form that models trained on such tools write.

    The namespace `functions`, into which Codex puts its own tools, is that of all functions: it is left out.
    """
    if namespace in (None, "", "functions"):
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


class QualifiedName(NamedTuple):
    """A function's namespace and name. An empty namespace means none."""

    namespace: str
    name: str


class _Namespace(Struct):
    """Functions under one name. Its `description` goes before that of its first function: templates have no
    other place for it."""

    name: str
    description: str | None = None
    tools: list[dict[str, Any]] = []


class _Allowed(Struct):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class _Named(Struct):
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesToolOffer:
    """`shown`: definitions for the chat template. `late`: those that a message has. `calling`:
    constraint on calls; None: unconstrained. `namespaces`: namespace and name by flat name. `customs`: flat
    names of the custom tools. `builtins`: names of the functions that stand for built-in tools."""

    shown: list[dict[str, Any]]
    calling: ToolCallConstraint | None
    namespaces: Mapping[str, QualifiedName]
    customs: frozenset[str] = frozenset()
    builtins: frozenset[str] = frozenset()
    late: Sequence[dict[str, Any]] = ()


def offer(
    groups: Sequence[PlacedTools], choice: str | Described | None, *, single: bool
) -> ResponsesToolOffer:
    """Return the offer. `groups`: the tools of the body, then those of its items, which never reorder
    earlier ones. `single`: allow at most one call. Raises `RequestError` naming the parameter at fault."""
    found: dict[str, OfferableTool] = {}
    late: set[str] = set()
    for within, tools, is_late in groups:
        listed: dict[str, OfferableTool] = {}
        for one in definitions(tools, within):
            listed.setdefault(flat_name(*one.split), one)
        late |= listed.keys() - found.keys() if is_late and found else set()
        found |= listed  # a later list may define a tool anew, which keeps its position
    named = [replace(one.function, name=name) for name, one in found.items()]
    granted = grant(named, _wish(choice, found), single=single, late=late)
    namespaces = {name: one.split for name, one in found.items() if one.split.namespace}
    customs = frozenset(name for name, one in found.items() if one.kind == "custom")
    builtins = frozenset(name for name, one in found.items() if one.kind == name and name in CALL_ITEMS)
    return ResponsesToolOffer(granted.tools, granted.calling, namespaces, customs, builtins, granted.late)


def definition_lines(tools: Sequence[Described], within: str) -> str:
    """Return the definitions of tools as the text of a message."""
    found = definitions(tools, within)
    return "\n".join(defined(replace(one.function, name=flat_name(*one.split))) for one in found)


class OfferableTool(NamedTuple):
    """A tool that is offered as a function. `kind`: its own type."""

    split: QualifiedName
    function: FunctionTool
    kind: str


def definitions(tools: Sequence[Described], within: str = "", namespace: str = "") -> Iterator[OfferableTool]:
    """Yield the tools that are offered, those of namespaces too. `within`: as in `PlacedTools`. Raises
    `RequestError` for an invalid tool."""
    for index, tool in enumerate(tools):
        place = f"{within}tools[{index}]"
        kind = _kind(tool)
        if kind == "namespace" and not namespace:
            nested = convert(tool, _Namespace, place)
            yield from _described(definitions(nested.tools, f"{place}.", nested.name), nested.description)
        elif (function := _function(kind, tool, place)) is not None:
            yield OfferableTool(QualifiedName(namespace, function.name), function, kind)


def _kind(tool: Described) -> str:
    """Return the type of a tool as it is written; a function's may be absent."""
    return str(tool.get("type") or "function")


def _described(tools: Iterator[OfferableTool], description: str | None) -> Iterator[OfferableTool]:
    """Yield the tools, the first with `description` before its own."""
    for one in tools:
        whole = "\n\n".join(filter(None, [description, one.function.description]))
        yield one._replace(function=replace(one.function, description=whole or None))
        description = None


def _function(kind: str, tool: Described, place: str) -> FunctionTool | None:
    """Return the function that is offered for a tool; None for one of another server."""
    match kind:
        case "function":
            return convert(tool, FunctionTool, place)
        case "custom":
            return convert(tool, CustomTool, place).function()
    return function_of(kind, tool, place)


def _wish(choice: str | Described | None, known: Mapping[str, OfferableTool]) -> ToolChoicePolicy:
    match choice:
        case None | "auto":
            return ToolChoicePolicy()
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case "required":
            return ToolChoicePolicy(required=True)
        case str():
            raise _unserved()
    match _kind(choice):
        case kind if kind in CALLABLE:
            [name] = _names("tool_choice", choice, known)
            return ToolChoicePolicy(required=True, name=name)
        case "allowed_tools":
            return _allowed(convert(choice, _Allowed, "tool_choice"), known)
        case _:
            raise _unserved()


def _allowed(allowed: _Allowed, known: Mapping[str, OfferableTool]) -> ToolChoicePolicy:
    names = [
        name
        for index, tool in enumerate(allowed.tools)
        if _kind(tool) in (*CALLABLE, "namespace")
        for name in _names(f"tool_choice.tools[{index}]", tool, known)
    ]
    return ToolChoicePolicy(allowed=frozenset(names), required=allowed.mode == "required")


def _names(place: str, tool: Described, known: Mapping[str, OfferableTool]) -> list[str]:
    """Return the flat name of a tool, or those of a namespace. A name alone may be that of one namespace."""
    kind = _kind(tool)
    named = _Named(kind) if kind in CALL_ITEMS else convert(tool, _Named, place)
    name = flat_name(named.namespace, named.name)
    if kind == "namespace":
        found = [flat for flat, one in known.items() if one.split.namespace == named.name]
    elif name in known:
        return [name]
    else:
        found = [flat for flat, one in known.items() if one.split.name == name]
        found = found if len(found) == 1 else []
    if not found:
        raise wrong(f"{place}.name", f"is {name[:64]!r}, which is not a function in 'tools'")
    return found


def _unserved() -> RequestError:
    return wrong("tool_choice", "must be 'auto', 'none', 'required', a function or 'allowed_tools'")


def tool_document(tool: Described) -> dict[str, Any]:
    """Return a tool as the response repeats it; functions get all fields that SDK types require."""
    absent = {"description": None, "parameters": None, "strict": None}
    return absent | dict(tool) if (tool.get("type") or "function") == "function" else dict(tool)
