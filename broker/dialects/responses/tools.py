"""Tools as a client of responses describes them -> what is offered of them.

Functions are, those of a namespace under both names in one, as templates know no namespaces, and as functions
those that take text as it is (`custom`). Tools that the server would have to run itself (a web search, say)
are passed over: it runs none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from broker.dialects.body import convert
from broker.dialects.responses.custom import CustomTool
from broker.dialects.tools import NAME_CHARACTERS_MAX, FunctionTool, Wish, grant
from protocol.errors import Code, RequestError
from protocol.parts import Calling

Described = Mapping[str, Any]


def flat_name(namespace: str | None, name: str) -> str:
    """Both names in one, as models that call such tools have learnt to write them."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class Split(NamedTuple):
    """A function's name, and that of the namespace it is in; empty: of none."""

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
class Offer:
    """`shown`: what the template is given. `calling`: how they are called; None: freely. `namespaces`: the
    names of those that are shown under two in one. `customs`: under which names those are shown that take
    text as it is."""

    shown: list[dict[str, Any]]
    calling: Calling | None
    namespaces: Mapping[str, Split]
    customs: frozenset[str] = frozenset()


def offer(tools: Sequence[Described], choice: str | Described | None, *, single: bool) -> Offer:
    """`single`: at most one call is wanted. Raises `RequestError` naming the parameter at fault."""
    found: dict[str, _Found] = {}
    for one in _found(tools):
        found.setdefault(flat_name(*one.split), one)
    named = [replace(one.function, name=name) for name, one in found.items()]
    granted = grant(named, _wish(choice, found.keys()), single=single)
    namespaces = {name: one.split for name, one in found.items() if one.split.namespace}
    customs = frozenset(name for name, one in found.items() if one.is_custom)
    return Offer(granted.tools, granted.calling, namespaces, customs)


class _Found(NamedTuple):
    split: Split
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
                yield _Found(Split(namespace, function.name), function, is_custom)
            case "namespace" if not namespace:
                nested = convert(tool, _Namespace, place)
                yield from _found(nested.tools, f"{place}.", nested.name)


def _custom(tool: Described, place: str) -> FunctionTool:
    return convert(tool, CustomTool, place).function()


def _wish(choice: str | Described | None, known: Collection[str]) -> Wish:
    match choice:
        case None | "auto":
            return Wish()
        case "none":
            return Wish(allowed=frozenset())
        case "required":
            return Wish(required=True)
        case str():
            raise _unserved()
    match choice.get("type"):
        case "function" | "custom":
            return Wish(required=True, name=_name("tool_choice", choice, known))
        case "allowed_tools":
            return _allowed(convert(choice, _Allowed, "tool_choice"), known)
        case _:
            raise _unserved()


def _allowed(allowed: _Allowed, known: Collection[str]) -> Wish:
    names = frozenset(
        _name(f"tool_choice.tools[{index}]", tool, known)
        for index, tool in enumerate(allowed.tools)
        if tool.get("type", "function") in ("function", "custom")
    )
    return Wish(allowed=names, required=allowed.mode == "required")


def _name(place: str, tool: Described, known: Collection[str]) -> str:
    named = convert(tool, _Named, place)
    if (name := flat_name(named.namespace, named.name)) not in known:
        message = f"'{place}.name' is {name[:64]!r}, and there is no such function among the 'tools'."
        raise RequestError(Code.INVALID_REQUEST, message, param=f"{place}.name")
    return name


def _unserved() -> RequestError:
    message = "'tool_choice' can be 'auto', 'none', 'required', a function or 'allowed_tools' here."
    return RequestError(Code.INVALID_REQUEST, message, param="tool_choice")


def told(tool: Described) -> dict[str, Any]:
    """A tool as its response repeats it: of a function, all that clients' types ask for."""
    absent = {"description": None, "parameters": None, "strict": None}
    return absent | dict(tool) if tool.get("type", "function") == "function" else dict(tool)
