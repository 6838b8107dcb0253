"""Tokenizer adapter for llguidance: tokens as bytes, and special tokens that never match text.

Built from our own `Vocabulary`, so it works with every tokenizer. One per model, immutable, shared by all
threads. For 152,000 tokens it takes about a second and 50 MB, so it is built when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

_BLANK = b" \t\r\n"
BLANK_BYTES_MAX = 4
"""Maximum length of the white-space tokens that are allowed between reasoning and content."""


class GrammarTokenizer:
    """llguidance tokenizer of `width` tokens, the size of the model's logits.

    Has two masks, [words] uint32: white-space tokens, and all tokens that do not end an answer.
    """

    def __init__(
        self, spell: Callable[[int], bytes], width: int, names: Mapping[int, str], ends: Sequence[int]
    ) -> None:
        """`spell`: returns the bytes of a token. `names`: of special tokens. `ends`: at least one of them."""
        known = {token: name for token, name in names.items() if token < width}
        ends = sorted(token for token in ends if token < width)
        pieces = [known[token].encode() if token in known else spell(token) for token in range(width)]
        source = _Source(pieces, sorted({*known, *ends}), ends[0])
        self.width = width
        self.tokenizer = LLTokenizer(TokenizerWrapper(source), n_vocab=width, eos_token=ends)
        self.names = {name: token for token, name in known.items()}
        self.special = frozenset({*known, *ends})
        self._silent = self.special | {token for token, piece in enumerate(pieces) if not piece}
        blanks = [token for token in range(width) if token not in self.special and _is_blank(pieces[token])]
        self.blanks = frozenset(blanks)
        self.blank_mask = _mask(width, blanks)
        self.endless_mask = _mask(width, sorted({*range(width)}.difference(ends)))

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special tokens."""
        if token in self._silent or token >= self.width:
            return b""
        return bytes(self.tokenizer.decode_bytes([token]))

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokenize bytes, dropping incomplete characters. It need not be the model's own tokenization."""
        return list(self.tokenizer.greedy_tokenize(text.decode(errors="ignore"))) if text else []


def _mask(width: int, tokens: Sequence[int]) -> np.ndarray:
    bits = np.zeros(32 * ((width + 31) // 32), np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _is_blank(piece: bytes) -> bool:
    return 0 < len(piece) <= BLANK_BYTES_MAX and not piece.strip(_BLANK)


class _Source:
    """Tokenizer interface that llguidance expects. It never tokenizes, because our grammars force nothing."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end

    def __call__(self, text: object) -> list[int]:
        return []
