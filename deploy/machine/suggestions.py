"""Suggested models, those that fit the machine, and how fast it would run them. Pure; the list is data in
`suggestions.toml`.

Decoding reads the active weights once for each token, so memory bandwidth bounds its speed. `EFFICIENCY` is
the share of the bandwidth that others report for MLX on short contexts; nothing here was measured by us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

CONTEXT_WANTED = 8192
"""Minimum context in tokens for which a suggested model must have memory."""
EFFICIENCY = 0.7
"""Share of the memory's bandwidth that decoding uses."""

_FILE = Path(__file__).with_name("suggestions.toml")

Positive = Annotated[int, Meta(gt=0)]


class Suggestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model. `active_bytes`: bytes of weights that each token reads; None: all. `expert_bytes`: bytes of
    its experts, which `--experts-memory` can leave on disk."""

    id: str
    weight_bytes: Positive
    token_bytes: Positive
    context_length: Positive
    about: str
    active_bytes: Positive | None = None
    expert_bytes: Positive | None = None


class SuggestionList(Struct, frozen=True, forbid_unknown_fields=True):
    """The kept list. `date`: year and month of the last change. `bandwidth`: GB per second by chip."""

    date: Annotated[str, Meta(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
    model: list[Suggestion]
    bandwidth: dict[str, Positive]


ON_DISK_MAX = 0.5
"""Share of a suggested model's experts that may stay on disk: with more, most tokens wait for it."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A model that fits. `context`: tokens for all requests together. `tokens_per_s`: expected for one short
    request; None: the chip is unknown."""

    model: Suggestion
    context: int
    tokens_per_s: float | None = None


LIST = msgspec.toml.decode(_FILE.read_bytes(), type=SuggestionList)
SUGGESTIONS = LIST.model
"""Smallest first."""


def context_that_fits(suggestion: Suggestion, bytes_for_model: int) -> int:
    """Return the tokens of context for all requests together, at most the model's context length."""
    left = max(0, bytes_for_model - suggestion.weight_bytes)
    return min(suggestion.context_length, left // suggestion.token_bytes)


def models_that_fit(bytes_for_model: int, chip: str = "") -> Sequence[Fit]:
    """Return the models that fit with `CONTEXT_WANTED` tokens, largest first. `chip`: its name."""
    found = [
        Fit(each, context_that_fits(each, bytes_for_model), tokens_per_s(each, chip)) for each in SUGGESTIONS
    ]
    return [fit for fit in reversed(found) if fit.context >= CONTEXT_WANTED]


def tokens_per_s(
    suggestion: Suggestion, chip: str, bandwidth: Mapping[str, int] = LIST.bandwidth
) -> float | None:
    """Return the expected speed of one short request; None: the chip is not in the list."""
    if (speed := bandwidth.get(chip)) is None:
        return None
    return EFFICIENCY * speed * 1e9 / (suggestion.active_bytes or suggestion.weight_bytes)


def best_fit(fits: Sequence[Fit], tokens_per_s_min: float = 15.0) -> Fit | None:
    """Return the model to begin with: the largest that is not too slow to read along, else the fastest."""
    quick = [fit for fit in fits if fit.tokens_per_s is None or fit.tokens_per_s >= tokens_per_s_min]
    return quick[0] if quick else max(fits, key=lambda fit: fit.tokens_per_s or 0.0, default=None)


def first_model_hint(fits: Sequence[Fit]) -> str:
    """Return what `serve` says once when no model is named; empty if only the embedded one fits."""
    if (best := best_fit(fits)) is None:
        return ""
    size, context = f"{best.model.weight_bytes / 1e9:.1f} GB", f"{best.context:,} tokens of context"
    speed = f", about {best.tokens_per_s:.0f} tokens/s" if best.tokens_per_s else ""
    return (
        "no --model is named: the embedded one is a toy for trying things out. This machine can run"
        f" {best.model.id} ({size}, {context}{speed}); `roundhouse models` lists more"
    )


def fit_with_experts_on_disk(bytes_for_model: int) -> tuple[Suggestion, int] | None:
    """Return the largest model that fits only if a part of its experts, at most `ON_DISK_MAX`, stays on disk,
    and the bytes of those in memory; None: there is none."""
    for each in reversed(SUGGESTIONS):
        if context_that_fits(each, bytes_for_model) >= CONTEXT_WANTED:
            return None
        experts = each.expert_bytes or 0
        in_memory = bytes_for_model - (each.weight_bytes - experts + CONTEXT_WANTED * each.token_bytes)
        if experts and in_memory >= (1 - ON_DISK_MAX) * experts:
            return each, in_memory
    return None
