"""Legacy function calling: `functions` and `function_call`, replaced by `tools` in 2023; at most one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from broker.dialects.body import wrong
from broker.dialects.tools import FunctionTool, Named, ToolChoicePolicy, ToolOffer, grant

FunctionChoice = Literal["none", "auto"] | Named


def offer(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> ToolOffer:
    """Return the offer for `functions`, like `tools.offer`. Raises `RequestError`."""
    return grant(functions, _wish(functions, choice), single=True)


def _wish(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> ToolChoicePolicy:
    match choice:
        case None | "auto":
            return ToolChoicePolicy()
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case Named(name):
            if name not in [function.name for function in functions]:
                raise wrong("function_call.name", f"is {name[:64]!r}, which is not in 'functions'")
            return ToolChoicePolicy(required=True, name=name)
