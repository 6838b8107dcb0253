"""Answers that a client has begun: the last message is the assistant's, and the model goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, is_begun
from protocol.errors import Code, RequestError


def options(
    messages: Sequence[Mapping[str, Any]], *, continues: bool | None, opens: bool | None
) -> dict[str, str]:
    """What the worker is told of the prompt's end, beside the template's own options. `continues`, `opens`:
    `continue_final_message` and `add_generation_prompt`, as clients of vLLM ask for it.

    Raises `RequestError` for both, and where there is nothing to go on with.
    """
    param = "continue_final_message"
    if not continues:
        return {PROMPT_ENDS: BEFORE_TURN} if opens is False else {}
    if opens:
        message = f"'{param}' and 'add_generation_prompt' cannot both be true."
        raise RequestError(Code.INVALID_REQUEST, message, param=param)
    if not is_begun(messages):
        message = f"'{param}' needs a last message of the assistant's, with text and without calls."
        raise RequestError(Code.INVALID_REQUEST, message, param=param)
    return {PROMPT_ENDS: IN_MESSAGE}
