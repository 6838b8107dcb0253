"""Grammar masks: which tokens a guide allows next in rows with structured output.

A row owns its guide, and with it the tokens that the guide has not seen. These are passed on, in order, when
the guide is next called, so both happen in the calling thread. A guide that fails, fails its row alone: the
row is no longer constrained, and `failure` is reported in place of its next token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx
import numpy as np

from worker.values import ForcedTokens, Guide, GuideError

Answer = TypeVar("Answer")

_WORD_BITS = 32
_ALL = 2**_WORD_BITS - 1

THREADS_MAX = 4
"""Maximum number of threads, the caller's included."""
ALONE_S_MAX = 0.0005
"""Seconds for which the caller works alone."""

Job = Callable[[], None]


class GuidedRow:
    """One row's guide, and the tokens that it has not seen."""

    def __init__(self, guide: Guide) -> None:
        self.failure: Exception | None = None
        self._guide = guide
        self._unseen: list[int] = []

    def accept_token(self, token: int) -> None:
        """Record the next token of the output."""
        self._unseen.append(token)

    def fill(self, mask: np.ndarray) -> bool:
        """As `Guide.fill`, into words. Never raises. Safe in any thread, one at a time."""
        return self._asked(lambda guide: guide.fill(mask.data), False)

    def forced_tokens(self, most: int) -> ForcedTokens:
        """As `Guide.forced_tokens`. Never raises."""
        return self._asked(lambda guide: guide.forced_tokens(most), ForcedTokens())

    def _asked(self, question: Callable[[Guide], Answer], otherwise: Answer) -> Answer:
        """Call the guide once it has seen all tokens; return `otherwise` if it has failed."""
        if self.failure is not None:
            return otherwise
        try:
            unseen, self._unseen = self._unseen, []
            for token in unseen:
                self._guide.accept_token(token)
            return question(self._guide)
        except Exception as failure:  # request boundary: fails this request alone; logged when reported
            self.failure = failure
            return otherwise


class Masks:
    """Bit masks of the tokens allowed next in some rows of a batch, reused for each step.

    Call `ask` or `spare` for every row, then `gather`.
    """

    def __init__(self, rows: int) -> None:
        self._words = np.empty((rows, 0), np.uint32)
        self._is_set = [False] * rows
        self._vocabulary = 0

    def clear(self, vocabulary: int) -> None:
        """Reset the masks, for `vocabulary` tokens."""
        if self._vocabulary != vocabulary:
            self._vocabulary = vocabulary
            self._words = np.empty((len(self._words), -(-vocabulary // _WORD_BITS)), np.uint32)
        self._words.fill(0)

    def ask(self, place: int, held: GuidedRow) -> None:
        """Fill one row's mask. Safe in any thread: rows are independent."""
        words = self._words[place]
        self._is_set[place] = held.fill(words)
        words[-1] &= _ALL >> -self._vocabulary % _WORD_BITS
        if self._is_set[place] and not words.any():
            held.failure = GuideError("it allows no next token")
            self._is_set[place] = False

    def spare(self, place: int) -> None:
        """Allow every token in one row."""
        self._is_set[place] = False

    def gather(self) -> Mask | None:
        """Return the masks of all rows; None: every token is allowed in each."""
        if not any(self._is_set):
            return None
        for place, is_set in enumerate(self._is_set):
            if not is_set:
                self._words[place] = _ALL
        bits = np.unpackbits(self._words.view(np.uint8), axis=-1, count=self._vocabulary, bitorder="little")
        return Mask(mx.array(bits), mx.array(self._firsts(), mx.uint32))

    def _firsts(self) -> list[int]:
        """Return the first allowed token of each row."""
        places = (self._words != 0).argmax(axis=1)
        words: list[int] = self._words[np.arange(len(places)), places].tolist()
        pairs = zip(places.tolist(), words, strict=True)
        return [_WORD_BITS * place + (word & -word).bit_length() - 1 for place, word in pairs]


class Mask:
    """Expanded masks. `bits`, [rows, vocabulary] uint8: 1 for each allowed token. `first`, [rows] uint32: an
    allowed token of each row.

    Bits are expanded on the host and applied by arithmetic: on a CPU unpredictable selections take five times
    as long, and so does expanding bits in MLX. Minus infinity, because exponentials of very large numbers
    take twice as long.
    """

    def __init__(self, bits: mx.array, first: mx.array) -> None:
        self._bits = bits
        self._first = first

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits`, [rows, vocabulary], with minus infinity for the tokens that are not allowed."""
        return logits + (1 - 1 / self._bits.astype(logits.dtype))

    def keep(self, tokens: mx.array) -> mx.array:
        """Replace those of `tokens`, [rows], that are not allowed. These can only be sampled where no allowed
        token has a finite logit."""
        may = mx.take_along_axis(self._bits, tokens[:, None], axis=-1)[:, 0]
        return mx.where(may > 0, tokens, self._first)


class MaskThreads:
    """Thread pool for masks, work between two tokens that may take long; its threads start when first needed.

    The caller begins alone: jobs of a few hundred microseconds end before another thread is awake. Then all
    threads take jobs from one iterator, so none waits for a thread that has not started.
    """

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: number, the caller's included; None: the number of cores, up to `THREADS_MAX`."""
        self._others = (threads or min(THREADS_MAX, os.cpu_count() or 1)) - 1
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run each of the jobs once, in any order. They must not raise."""
        left, began = iter(jobs), time.perf_counter()
        called: list[Future[None]] = []
        for number, job in enumerate(left, start=1):
            job()
            if not called and time.perf_counter() - began > ALONE_S_MAX:
                called = self._call(left, len(jobs) - number - 1)
        for other in called:
            other.result()

    def _call(self, left: Iterator[Job], jobs: int) -> list[Future[None]]:
        """Start threads for all but one of the remaining jobs."""
        others = min(self._others, jobs)
        if others <= 0:
            return []
        self._pool = self._pool or ThreadPoolExecutor(self._others, thread_name_prefix="guides")
        return [self._pool.submit(_take, left) for _ in range(others)]


def _take(left: Iterator[Job]) -> None:
    # An iterator over a list never returns one item to two threads.
    for job in left:
        job()
