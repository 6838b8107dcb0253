"""Legacy function calling: `functions` and `function_call`, replaced by `tools` in 2023; at most one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from broker.dialects.tools import NAME_CHARACTERS_MAX, FunctionTool, Named, ToolChoicePolicy, ToolOffer, grant
from protocol.errors import Code, RequestError

FunctionChoice = Literal["none", "auto"] | Named


def offer(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> ToolOffer:
    """Return the offer for `functions`, like `tools.offer`. Raises `RequestError`."""
    for index, function in enumerate(functions):
        if not 1 <= len(function.name) <= NAME_CHARACTERS_MAX:
            param = f"functions[{index}].name"
            message = f"'{param}' must have 1 to {NAME_CHARACTERS_MAX} characters."
            raise RequestError(Code.INVALID_REQUEST, message, param=param)
    return grant(functions, _wish(functions, choice), single=True)


def _wish(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> ToolChoicePolicy:
    match choice:
        case None | "auto":
            return ToolChoicePolicy()
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case Named(name):
            if name not in [function.name for function in functions]:
                message = f"'function_call.name' is {name[:64]!r}, which is not in 'functions'."
                raise RequestError(Code.INVALID_REQUEST, message, param="function_call.name")
            return ToolChoicePolicy(required=True, name=name)
