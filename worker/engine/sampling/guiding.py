"""Answers that are held to a grammar: which tokens may come next, asked of guides, and nothing else drawn.

A row owns its guide from its start to its end, and with it the tokens that the guide has yet to see: they are
handed over, in order, when it is next asked, so that both happen in the thread that asks. A guide that fails
fails its row alone: the row goes free from then on, and `failure` is told in place of its next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from worker.contract import Guide

_WORD_BITS = 32


class Held:
    """One row's guide, and what it has seen of the answer."""

    def __init__(self, guide: Guide) -> None:
        self.failure: Exception | None = None
        self._guide = guide
        self._unseen: list[int] = []

    def saw(self, token: int) -> None:
        """The next token of the answer has been read."""
        self._unseen.append(token)

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        """Which of so many tokens may come next, at least one: [vocabulary] uint8, 1 for each. None: all.

        Never raises. Called by any thread, by one at a time."""
        if self.failure is not None:
            return None
        try:
            return self._ask(vocabulary)
        except Exception as failure:  # the request boundary: its grammar's fault; logged when it is told
            self.failure = failure
            return None

    def _ask(self, vocabulary: int) -> np.ndarray | None:
        unseen, self._unseen = self._unseen, []
        for token in unseen:
            self._guide.saw(token)
        words = np.zeros(-(-vocabulary // _WORD_BITS), np.uint32)
        if not self._guide.fill(words.data):
            return None
        # Words are little-endian wherever MLX runs.
        bits = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
        if not bits.any():
            raise ValueError("a grammar lets no token follow")
        return bits


class Mask:
    """What may come next in some rows of a batch.

    Bits are expanded on the host and applied by arithmetic: on a CPU selections that cannot be predicted take
    five times as long, and so does expanding bits on the device.
    """

    def __init__(self, bits: mx.array, first: mx.array) -> None:
        """`bits` [rows, vocabulary] uint8: 1 for each token that may. `first` [rows] uint32: one of them."""
        self._bits = bits
        self._first = first

    @classmethod
    def of(cls, allowed: Sequence[np.ndarray | None], vocabulary: int) -> Mask | None:
        """From what may come next in each row: [vocabulary] uint8, or None where anything may. None if it may
        in all."""
        if all(row is None for row in allowed):
            return None
        everything = np.ones(vocabulary, np.uint8)
        bits = np.stack([everything if row is None else row for row in allowed])
        return cls(mx.array(bits), mx.array(bits.argmax(axis=1).astype(np.uint32)))

    def apply(self, logits: mx.array) -> mx.array:
        """`logits` [rows, vocabulary], minus infinity where a token may not come."""
        return logits + (1 - 1 / self._bits.astype(logits.dtype))

    def keep(self, tokens: mx.array) -> mx.array:
        """`tokens` [rows], drawn from masked logits. One that may not come, which can be drawn where no logit
        of those that may is a number, is replaced."""
        may = mx.take_along_axis(self._bits, tokens[:, None], axis=-1)[:, 0]
        return mx.where(may > 0, tokens, self._first)
