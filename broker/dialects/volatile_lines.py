"""Removal of lines that agents put before their system prompts and that change between requests. Pure.

They are meant for billing, not for the model. A prompt that begins with one shares no prefix with cached
prompts, so each conversation, or each request, would be prefilled from its first token. Any other beginning
of a system prompt is left unchanged.
"""

from __future__ import annotations

import re

HEADS = (
    "x-anthropic-billing-header:",  # Claude Code: `cc_version` varies by conversation, `cch` by request
)
"""Exact beginnings of such lines."""

_LINES = re.compile(rf"(?:(?:{'|'.join(map(re.escape, HEADS))})[^\n]*(?:\n+|\Z))+")


def without_head(text: str) -> str:
    """Return a system prompt without its leading volatile lines. Idempotent."""
    found = _LINES.match(text)
    return text[found.end() :] if found else text
