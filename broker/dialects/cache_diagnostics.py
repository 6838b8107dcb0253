"""Cache diagnostics, from a comparison of prompts, as the SDKs of OpenAI and Anthropic type them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.dispatch.prompt_records import Change, PromptComparison

HIT = {"type": "cache_hit"}
UNAVAILABLE = {"type": "unavailable"}
_REASONS: Mapping[Change, str] = {
    "model": "model_changed",
    "salt": "prompt_cache_key_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
    "options": "reasoning_effort_changed",
}
_MESSAGE_REASONS: Mapping[Change, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}


def of_response(comparison: PromptComparison | None) -> dict[str, Any]:
    """Return OpenAI's `prompt_cache_diagnostics`. `comparison`: None if the other prompt is not known."""
    if comparison is None:
        return {"type": "comparison_response_not_found"}
    if comparison.change is None:
        return HIT
    return {
        "type": "cache_miss",
        "reason": _REASONS[comparison.change],
        "cache_missed_tokens": comparison.lost_tokens,
        "comparison_reusable_tokens": comparison.kept_tokens,
    }


def of_message(comparison: PromptComparison | None) -> dict[str, Any] | None:
    """Return Anthropic's `diagnostics`; None: no difference was found."""
    if comparison is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if comparison.change is None:
        return None
    if (reason := _MESSAGE_REASONS.get(comparison.change)) is None:
        return {"cache_miss_reason": UNAVAILABLE}
    return {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": comparison.lost_tokens}}
