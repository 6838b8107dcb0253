"""Answers that are held to a grammar: which tokens may come next, asked of guides, and nothing else drawn.

A row owns its guide from its start to its end, and with it the tokens that the guide has yet to see: they are
handed over, in order, when it is next asked, so that both happen in the thread that asks. A guide that fails
fails its row alone: the row goes free from then on, and `failure` is told in place of its next token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import numpy as np

from worker.guides import Foreseen, Guide

Answer = TypeVar("Answer")

_WORD_BITS = 32
_ALL = 2**_WORD_BITS - 1


class Held:
    """One row's guide, and what it has seen of the answer."""

    def __init__(self, guide: Guide) -> None:
        self.failure: Exception | None = None
        self._guide = guide
        self._unseen: list[int] = []

    def saw(self, token: int) -> None:
        """The next token of the answer has been read."""
        self._unseen.append(token)

    def fill(self, mask: np.ndarray) -> bool:
        """As `Guide.fill`, into words. Never raises. In any thread, in one at a time."""
        return self._asked(lambda guide: guide.fill(mask.data), False)

    def foresee(self, most: int) -> Foreseen:
        """As `Guide.foresee`. Never raises."""
        return self._asked(lambda guide: guide.foresee(most), Foreseen())

    def _asked(self, question: Callable[[Guide], Answer], otherwise: Answer) -> Answer:
        """When it has seen all; `otherwise` of one that has failed."""
        if self.failure is not None:
            return otherwise
        try:
            unseen, self._unseen = self._unseen, []
            for token in unseen:
                self._guide.saw(token)
            return question(self._guide)
        except Exception as failure:  # the request boundary: its grammar's fault; logged when it is told
            self.failure = failure
            return otherwise


class Masks:
    """What may come next in some rows of a batch, one step after the other: bits, as guides fill them.

    `ask` the guides of all rows, then `gather`.
    """

    def __init__(self, rows: int) -> None:
        self._words = np.empty((rows, 0), np.uint32)
        self._is_set = [False] * rows
        self._vocabulary = 0

    def clear(self, vocabulary: int) -> None:
        """Nothing is known yet of so many tokens."""
        if self._vocabulary != vocabulary:
            self._vocabulary = vocabulary
            self._words = np.empty((len(self._words), -(-vocabulary // _WORD_BITS)), np.uint32)
        self._words.fill(0)

    def ask(self, place: int, held: Held) -> None:
        """Find out about one row. In any thread: no row sees another."""
        words = self._words[place]
        self._is_set[place] = held.fill(words)
        words[-1] &= _ALL >> -self._vocabulary % _WORD_BITS
        if self._is_set[place] and not words.any():
            held.failure = ValueError("a grammar lets no token follow")
            self._is_set[place] = False

    def spare(self, place: int) -> None:
        """Anything may come next in one row."""
        self._is_set[place] = False

    def gather(self) -> Mask | None:
        """What was found out about all of them; None: anything may come next in each."""
        if not any(self._is_set):
            return None
        for place, is_set in enumerate(self._is_set):
            if not is_set:
                self._words[place] = _ALL
        bits = np.unpackbits(self._words.view(np.uint8), axis=-1, count=self._vocabulary, bitorder="little")
        return Mask(mx.array(bits), mx.array(self._firsts(), mx.uint32))

    def _firsts(self) -> list[int]:
        """Of each row the first token that may come next."""
        places = (self._words != 0).argmax(axis=1)
        words: list[int] = self._words[np.arange(len(places)), places].tolist()
        pairs = zip(places.tolist(), words, strict=True)
        return [_WORD_BITS * place + (word & -word).bit_length() - 1 for place, word in pairs]


class Mask:
    """What may come next, expanded. `bits` [rows, vocabulary] uint8: 1 for each token that may. `first`
    [rows] uint32: one of those of each row.

    Bits are expanded on the host and applied by arithmetic: on a CPU selections that cannot be predicted take
    five times as long, and so does expanding bits by MLX. Minus infinity, because exponentials of very large
    numbers take twice as long.
    """

    def __init__(self, bits: mx.array, first: mx.array) -> None:
        self._bits = bits
        self._first = first

    def apply(self, logits: mx.array) -> mx.array:
        """`logits` [rows, vocabulary], minus infinity where a token may not come."""
        return logits + (1 - 1 / self._bits.astype(logits.dtype))

    def keep(self, tokens: mx.array) -> mx.array:
        """`tokens` [rows], drawn from what was applied. One that may not come, which can be drawn where no
        logit of those that may is finite, is replaced."""
        may = mx.take_along_axis(self._bits, tokens[:, None], axis=-1)[:, 0]
        return mx.where(may > 0, tokens, self._first)
