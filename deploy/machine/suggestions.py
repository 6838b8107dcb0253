"""A few models that are known to be good, and which of them fit. Pure.

Sizes are those of their files; what a token of context takes is by their configurations, keys and values in
16 bits of the layers that keep all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_WANTED = 8192
"""A model that has no room for so much is not suggested."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    id: str
    weight_bytes: int
    token_bytes: int
    context_length: int
    about: str


SUGGESTIONS = (
    Suggestion("mlx-community/Qwen3-0.6B-4bit", 335_000_000, 114_688, 40_960, "tiny and quick"),
    Suggestion("mlx-community/Qwen3-1.7B-4bit", 968_000_000, 114_688, 40_960, "small, for simple tasks"),
    Suggestion("mlx-community/Qwen3-4B-4bit", 2_263_000_000, 147_456, 40_960, "for any laptop"),
    Suggestion("mlx-community/Qwen3-8B-4bit", 4_608_000_000, 147_456, 40_960, "thinks, calls tools"),
    Suggestion("mlx-community/Qwen3-14B-4bit", 8_308_000_000, 163_840, 40_960, "thinks longer, knows more"),
    Suggestion("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000, 24_576, 131_072, "quick for its size"),
    Suggestion(
        "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", 17_180_000_000, 98_304, 262_144, "quick, knows much"
    ),
    Suggestion(
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 17_180_000_000, 98_304, 262_144, "for coding"
    ),
    Suggestion(
        "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 44_800_000_000, 24_576, 262_144, "long contexts"
    ),
)


def context_that_fits(suggestion: Suggestion, bytes_for_model: int) -> int:
    """Tokens, of all requests together; no more than one of them can have."""
    left = max(0, bytes_for_model - suggestion.weight_bytes)
    return min(suggestion.context_length, left // suggestion.token_bytes)


def that_fit(bytes_for_model: int) -> Sequence[tuple[Suggestion, int]]:
    """Those with room for a conversation, and how long it may be; the largest first."""
    found = [(each, context_that_fits(each, bytes_for_model)) for each in SUGGESTIONS]
    return [pair for pair in reversed(found) if pair[1] >= CONTEXT_WANTED]
