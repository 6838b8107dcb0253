"""A model's tokens as llguidance knows them: bytes, and special tokens that never stand for text.

Made from our own `Vocabulary`, whatever the tokenizer is. One per model, shared by all threads, never
changed. At 152,000 tokens it takes about a second and 50 MB, so it is made
when a model is loaded: no request should wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

_BLANK = b" \t\r\n"
BLANK_BYTES_MAX = 4
"""The longest token of white space that is offered between a thought and what follows."""


class Lexicon:
    """`width` tokens, as many as the model has logits.

    Two masks, [words] uint32: of white space, and of all that does not end an answer.
    """

    def __init__(
        self, spell: Callable[[int], bytes], width: int, names: Mapping[int, str], ends: Sequence[int]
    ) -> None:
        """`spell`: the bytes of a token; `names`: of the special ones, `ends` among them, at least one."""
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
        """The bytes of a token that is not special; of any other, none."""
        if token in self._silent or token >= self.width:
            return b""
        return bytes(self.tokenizer.decode_bytes([token]))

    def tokens_of(self, text: bytes) -> list[int]:
        """Some tokens that have these bytes, whole characters of them."""
        return list(self.tokenizer.greedy_tokenize(text.decode(errors="ignore"))) if text else []


def _mask(width: int, tokens: Sequence[int]) -> np.ndarray:
    bits = np.zeros(32 * ((width + 31) // 32), np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _is_blank(piece: bytes) -> bool:
    return 0 < len(piece) <= BLANK_BYTES_MAX and not piece.strip(_BLANK)


class _Source:
    """What llguidance asks a tokenizer for. It is never asked to tokenize: our grammars force nothing."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end

    def __call__(self, text: object) -> list[int]:
        return []
