"""Assistant prefill: the last message is the assistant's, and the model continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.dialects.body import wrong
from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, ends_with_prefill


def options(
    messages: Sequence[Mapping[str, Any]], *, continues: bool | None, opens: bool | None
) -> dict[str, str]:
    """Return the worker's option for the end of the prompt, to add to the template's arguments.

    `continues`, `opens`: vLLM's `continue_final_message` and `add_generation_prompt`. Raises `RequestError`
    if both are true, and if there is no message to continue.
    """
    param = "continue_final_message"
    if not continues:
        return {PROMPT_ENDS: BEFORE_TURN} if opens is False else {}
    if opens:
        raise wrong(param, "and 'add_generation_prompt' cannot both be true")
    if not ends_with_prefill(messages):
        raise wrong(param, "requires a last message of the assistant with text and without tool calls")
    return {PROMPT_ENDS: IN_MESSAGE}
