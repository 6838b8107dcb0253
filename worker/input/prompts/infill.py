"""Fill-in-the-middle prompts: the markers of each model family, and the order of prefix and suffix.

A tokenizer whose vocabulary has all markers of a family belongs to it. The model writes the middle after the
last marker.

| family | prompt | source |
|---|---|---|
| Qwen2.5-Coder, CodeGemma | `<|fim_prefix|>` prefix `<|fim_suffix|>` suffix `<|fim_middle|>` | model cards |
| StarCoder, Granite | `<fim_prefix>` prefix `<fim_suffix>` suffix `<fim_middle>` | model cards |
| SantaCoder | the same with `<fim-prefix>` and so on | model card |
| DeepSeek-Coder | `<｜fim▁begin｜>` prefix `<｜fim▁hole｜>` suffix `<｜fim▁end｜>` | its README |
| CodeLlama | `▁<PRE>` prefix `▁<SUF>` suffix `▁<MID>` | `infilling_prompt_tokens`, Meta's `generation.py` |
| Codestral | `[SUFFIX]` suffix `[PREFIX]` prefix | `encode_fim`, `mistral_common` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_ANCHOR = "☺"
"""Encoded before a suffix to avoid a leading space, as in `encode_infilling` of Meta's tokenizer."""


@dataclass(frozen=True, slots=True)
class Infill:
    """Format of a family. `suffix_first`: the suffix comes before the prefix. `middle`: the marker after
    both; empty: none. `end_markers`: end a middle, besides the other markers. `adds_space`: the tokenizer
    puts a space before every text, which a suffix must not have."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    end_markers: tuple[str, ...] = ()
    adds_space: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.prefix, self.suffix, self.middle) if marker)


FAMILIES = (
    Infill(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        end_markers=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    Infill(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        end_markers=("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>", end_markers=("<fim-pad>", "<|endoftext|>")),
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>", end_markers=("▁<EOT>",), adds_space=True),
    Infill("[PREFIX]", "[SUFFIX]", suffix_first=True, adds_space=True),
)


@dataclass(frozen=True, slots=True)
class Infilling:
    """Encodes a family's prompts with a tokenizer's ids. `end_tokens`: never occur in a middle and end it."""

    family: Infill
    ids: Mapping[str, int]
    end_tokens: frozenset[int]

    def tokens(
        self, opening: Sequence[int], prefix: Sequence[int], suffix: str, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the tokens of the whole prompt. `opening`: tokens that begin every prompt of the model."""
        family, ids = self.family, self.ids
        behind = _within(suffix, encode) if family.adds_space else encode(suffix)
        first, second = [ids[family.prefix], *prefix], [ids[family.suffix], *behind]
        if family.suffix_first:
            first, second = second, first
        return [*opening, *first, *second, *([ids[family.middle]] if family.middle else [])]


def _within(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    anchor, tokens = encode(_ANCHOR), encode(_ANCHOR + text)
    return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else encode(text)


def infilling_of(vocabulary: Mapping[str, int]) -> Infilling | None:
    """Return the encoder of the family whose markers are in the vocabulary; None: no family matches."""
    for family in FAMILIES:
        if all(marker in vocabulary for marker in family.markers):
            ids = {marker: vocabulary[marker] for marker in family.markers}
            further = [vocabulary[end] for end in family.end_markers if end in vocabulary]
            return Infilling(family, ids, frozenset([*ids.values(), *further]))
    return None
