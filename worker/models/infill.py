"""Prompts with a gap to be filled: how each family of models wants prefix and suffix, and by what marked.

A tokenizer that names the markers of a family belongs to it. What follows the last marker is the middle.

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
"""Stands before a text that begins within one, as in `encode_infilling` of Meta's tokenizer."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A family. `suffix_first`: the suffix stands before the prefix. `middle`: the marker behind both, if
    there is one. `ends`: what ends a middle besides the markers. `spaces`: the tokenizer puts a space before
    every text, which a suffix must not have."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    spaces: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.prefix, self.suffix, self.middle) if marker)


FAMILIES = (
    Infill(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",), spaces=True),
    Infill("[PREFIX]", "[SUFFIX]", suffix_first=True, spaces=True),
)


@dataclass(frozen=True, slots=True)
class Infilling:
    """A family with a tokenizer's ids. `ends`: tokens that no middle has, and that end it."""

    family: Infill
    ids: Mapping[str, int]
    ends: frozenset[int]

    def tokens(
        self, opening: Sequence[int], prefix: Sequence[int], suffix: str, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """The whole prompt. `opening`: what every prompt of the model begins with."""
        family, ids = self.family, self.ids
        behind = _within(suffix, encode) if family.spaces else encode(suffix)
        first, second = [ids[family.prefix], *prefix], [ids[family.suffix], *behind]
        if family.suffix_first:
            first, second = second, first
        return [*opening, *first, *second, *([ids[family.middle]] if family.middle else [])]


def _within(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    anchor, tokens = encode(_ANCHOR), encode(_ANCHOR + text)
    return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else encode(text)


def infilling_of(vocabulary: Mapping[str, int]) -> Infilling | None:
    """What the tokenizer's vocabulary names. None: nothing is known to be filled with it."""
    for family in FAMILIES:
        if all(marker in vocabulary for marker in family.markers):
            ids = {marker: vocabulary[marker] for marker in family.markers}
            further = [vocabulary[end] for end in family.ends if end in vocabulary]
            return Infilling(family, ids, frozenset([*ids.values(), *further]))
    return None
