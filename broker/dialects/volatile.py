"""Lines that agents put before their system prompts, and that change from one request to the next. Pure.

They are addressed to somebody's billing, not to the model. A prompt that begins with one has nothing in
common with what is stored of others like it, so each conversation, or each request, would be computed anew
from its first token. They are dropped; what else a system prompt begins with is left alone, whoever sent it.
"""

from __future__ import annotations

import re

HEADS = (
    "x-anthropic-billing-header:",  # Claude Code: `cc_version` varies by conversation, `cch` by request
)
"""How such a line begins, in full and as it is written there."""

_LINES = re.compile(rf"(?:(?:{'|'.join(map(re.escape, HEADS))})[^\n]*(?:\n+|\Z))+")


def without_head(text: str) -> str:
    """A system prompt without the volatile lines that it begins with: idempotent."""
    found = _LINES.match(text)
    return text[found.end() :] if found else text
