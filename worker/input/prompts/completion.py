"""Raw completion prompts: text or token ids to continue, or to fill in the middle of.

Fill-in-the-middle: a tokenizer whose vocabulary has all markers of a family belongs to it. The model writes
the middle after the last marker.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import Code, RequestError
from protocol.messages import Generate
from worker.input.prompts.token_limit import TokenLimit

_ANCHOR = "☺"
"""Encoded before a suffix to avoid a leading space, as in `encode_infilling` of Meta's tokenizer."""


class Completion:
    """Tokenizes completion prompts with one thread's tokenizer. `vocabulary`: the model's vocabulary size."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._infilling = infilling_of(tokenizer.get_vocab())

    @property
    def gap_ends(self) -> frozenset[int]:
        """Tokens that end fill-in-the-middle output, besides the model's end tokens."""
        return self._infilling.end_tokens if self._infilling else frozenset()

    def tokens(self, request: Generate, text: str, source: str, limit: TokenLimit) -> list[int]:
        """Return the tokens of a prompt that came as text or as ids. Raises `RequestError`, but not for every
        prompt that exceeds the limit."""
        begins = self._tokenizer.bos_token
        # As in `mlx_lm.stream_generate`: a prompt that begins with the BOS token gets no second one.
        special = begins is None or not text.startswith(begins)
        if request.suffix:
            return self._infilled(request, text, source, limit, special=special)
        if request.tokens is None:
            return encode(self._tokenizer, text, source, limit, special=special)
        self._check_tokens(request.tokens, source)
        return request.tokens

    def _infilled(
        self, request: Generate, text: str, source: str, limit: TokenLimit, *, special: bool
    ) -> list[int]:
        if self._infilling is None:
            message = (
                "'suffix' is not supported: this model's tokenizer has no known fill-in-the-middle tokens."
            )
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="suffix")
        if request.tokens is None:
            opening = self._tokenizer.encode("", add_special_tokens=True) if special else []
            prefix = encode(self._tokenizer, text, source, limit, special=False)
        else:
            self._check_tokens(request.tokens, source)
            opening, prefix = [], request.tokens
        plain = partial(encode, self._tokenizer, source="suffix", limit=limit, special=False)
        return self._infilling.tokens(opening, prefix, request.suffix, plain)

    def _check_tokens(self, tokens: Sequence[int], source: str) -> None:
        last = self._vocabulary - 1
        for index, token in enumerate(tokens):
            if token > last:
                which = f"{source}[{index}]"
                message = f"'{which}' is token {token}, but this model's tokens are 0 to {last}."
                raise RequestError(Code.INVALID_REQUEST, message, param=which)

    def echo_text(self, request: Generate) -> str:
        """Return the text of a prompt of token ids that is to be echoed; empty if none is needed."""
        if not request.echo or request.tokens is None:
            return ""
        # Special tokens are included, because the text must be the whole prompt.
        known = [token for token in request.tokens if token < len(self._tokenizer)]
        return str(
            self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


def encode(
    tokenizer: TokenizerWrapper, text: str, source: str, limit: TokenLimit, *, special: bool
) -> list[int]:
    """Return the tokens of a text that came in the parameter `source`. `special`: add the special tokens that
    the tokenizer puts around every text. Raises `RequestError` for invalid text, or for one that certainly
    exceeds the limit."""
    check_text(tokenizer, text, source, limit)
    with _tokenizing(source):
        return tokenizer.encode(text, add_special_tokens=special) if text else []


def check_text(tokenizer: TokenizerWrapper, text: str, source: str, limit: TokenLimit) -> None:
    """Raise `RequestError` for a long text that is invalid, or that certainly exceeds the limit."""
    with _tokenizing(source):
        limit.check_text(text, source, partial(tokenizer.encode, add_special_tokens=False))


@contextmanager
def _tokenizing(source: str) -> Iterator[None]:
    """Context manager that turns a tokenizer's errors into a `RequestError`."""
    try:
        yield
    except (TypeError, ValueError) as error:  # for example, half a surrogate pair
        raise RequestError(
            Code.INVALID_REQUEST, f"The {source} cannot be tokenized: {error}", param=source
        ) from error


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
