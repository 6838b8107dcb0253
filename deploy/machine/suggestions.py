"""Suggested models, and the choice of those that fit the machine. Pure.

`weight_bytes` is the size of a model's files. `token_bytes` follows from its configuration: 16-bit keys and
values of one token in the layers that cache the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_WANTED = 8192
"""Minimum context in tokens for which a suggested model must have memory."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    id: str
    weight_bytes: int
    token_bytes: int
    context_length: int
    about: str


SUGGESTIONS = (
    Suggestion("mlx-community/Qwen3-0.6B-4bit", 335_000_000, 114_688, 40_960, "tiny and fast"),
    Suggestion("mlx-community/Qwen3-1.7B-4bit", 968_000_000, 114_688, 40_960, "small, for simple tasks"),
    Suggestion("mlx-community/Qwen3-4B-4bit", 2_263_000_000, 147_456, 40_960, "for any laptop"),
    Suggestion("mlx-community/Qwen3-8B-4bit", 4_608_000_000, 147_456, 40_960, "reasoning, tool calls"),
    Suggestion("mlx-community/Qwen3-14B-4bit", 8_308_000_000, 163_840, 40_960, "reasoning, knows more"),
    Suggestion("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000, 24_576, 131_072, "fast for its size"),
    Suggestion(
        "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit",
        17_180_000_000,
        98_304,
        262_144,
        "fast, knows much",
    ),
    Suggestion(
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 17_180_000_000, 98_304, 262_144, "for coding"
    ),
    Suggestion(
        "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 44_800_000_000, 24_576, 262_144, "long contexts"
    ),
)


def context_that_fits(suggestion: Suggestion, bytes_for_model: int) -> int:
    """Return the tokens of context for all requests together, at most the model's context length."""
    left = max(0, bytes_for_model - suggestion.weight_bytes)
    return min(suggestion.context_length, left // suggestion.token_bytes)


def models_that_fit(bytes_for_model: int) -> Sequence[tuple[Suggestion, int]]:
    """Return the models that fit with `CONTEXT_WANTED` tokens, each with its context; largest first."""
    found = [(each, context_that_fits(each, bytes_for_model)) for each in SUGGESTIONS]
    return [pair for pair in reversed(found) if pair[1] >= CONTEXT_WANTED]
