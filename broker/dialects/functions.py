"""What `tools` replaced in 2023: `functions` and `function_call`, of which an answer has one at the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from broker.dialects.tools import NAME_CHARACTERS_MAX, FunctionTool, Named, Offer, Wish, grant
from protocol.errors import Code, RequestError

FunctionChoice = Literal["none", "auto"] | Named


def offer(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> Offer:
    """As `tools.offer`."""
    for index, function in enumerate(functions):
        if not 1 <= len(function.name) <= NAME_CHARACTERS_MAX:
            param = f"functions[{index}].name"
            message = f"'{param}' must have 1 to {NAME_CHARACTERS_MAX} characters."
            raise RequestError(Code.INVALID_REQUEST, message, param=param)
    return grant(functions, _wish(functions, choice), single=True)


def _wish(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> Wish:
    match choice:
        case None | "auto":
            return Wish()
        case "none":
            return Wish(allowed=frozenset())
        case Named(name):
            if name not in [function.name for function in functions]:
                message = f"'function_call.name' is {name[:64]!r}, and there is no such one in 'functions'."
                raise RequestError(Code.INVALID_REQUEST, message, param="function_call.name")
            return Wish(required=True, name=name)
