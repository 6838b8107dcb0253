"""Logit bias and repetition, presence and frequency penalties, applied before sampling.

Token counts are kept on the device. Between samplers a row owns its counts. A sampler borrows those of its
rows, stacked, adds each token when it is sampled, before the host has read it, and gives them back. At most
one sampler has a row's counts at a time.

A count is twice the token's occurrences in the output, plus one if the prompt has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from worker.values import SamplingParams

_IN_PROMPT = 1
_ANSWER_SHIFT = 1
_IN_ANSWER = 1 << _ANSWER_SHIFT


def is_penalized(sampling: SamplingParams) -> bool:
    """Return whether a request's samples depend on the tokens before them."""
    return (
        sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    )


class TokenCounts:
    """Token counts of one row, [vocabulary] uint32, allocated when the vocabulary is known."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: the prompt, the first `prompt_tokens` of them, and the output so far."""
        self._used: tuple[Sequence[int], Sequence[int]] | None = (
            tokens[:prompt_tokens],
            tokens[prompt_tokens:],
        )
        self._counts: mx.array | None = None

    def borrow(self, vocabulary: int) -> mx.array:
        """Return the counts and keep no reference; they must be given back before the next call."""
        if self._used is not None:
            prompt, answer = (_ids(tokens, vocabulary) for tokens in self._used)
            self._used = None
            counts = mx.zeros(vocabulary, mx.uint32)
            return counts.at[prompt].maximum(_IN_PROMPT).at[answer].add(_IN_ANSWER)
        assert self._counts is not None, "another sampler has the counts of this row"
        counts, self._counts = self._counts, None
        return counts

    def give_back(self, counts: mx.array) -> None:
        """Take back the counts, after the last sampled token."""
        self._counts = counts


class Penalties:
    """The penalties of some rows of a batch."""

    def __init__(self, draws: Sequence[SamplingParams], counts: Sequence[TokenCounts]) -> None:
        self._owners = counts
        self._counts: mx.array | None = None
        self._rows = mx.arange(len(draws))
        self._presence = _column([sampling.presence_penalty for sampling in draws])
        self._frequency = _column([sampling.frequency_penalty for sampling in draws])
        repeats = [sampling.repetition_penalty for sampling in draws]
        self._repetition = _column(repeats) if any(penalty != 1 for penalty in repeats) else None
        self._is_answer_counted = any(
            sampling.presence_penalty or sampling.frequency_penalty for sampling in draws
        )

    def __call__(self, logits: mx.array) -> mx.array:
        """Return penalized `logits`, [rows, vocabulary] float32. Dividing by 1 and subtracting 0 change
        nothing.

        No selections: on a CPU unpredictable ones take ten times as long as arithmetic.
        """
        if self._counts is None:
            self._counts = mx.stack([owner.borrow(logits.shape[-1]) for owner in self._owners])
        if self._repetition is not None:
            penalty = 1 + (self._repetition - 1) * mx.minimum(self._counts, 1)
            logits = mx.maximum(logits, 0) / penalty + mx.minimum(logits, 0) * penalty
        if self._is_answer_counted:
            answered = self._counts >> _ANSWER_SHIFT
            logits = logits - self._frequency * answered - self._presence * mx.minimum(answered, 1)
        return logits

    def add(self, tokens: mx.array, going: Sequence[bool] | None = None) -> mx.array:
        """Count `tokens`, [rows], sampled from the last call's logits, in the rows that are `going`; None: in
        all. Return what must be evaluated."""
        assert self._counts is not None, "tokens were counted before any were drawn"
        times = _IN_ANSWER if going is None else mx.array(list(going)).astype(mx.uint32) * _IN_ANSWER
        self._counts = self._counts.at[self._rows, tokens].add(times)
        return self._counts

    def release(self) -> None:
        """Give the counts back to the rows."""
        if self._counts is None:
            return
        for row, owner in enumerate(self._owners):
            owner.give_back(self._counts[row])
        self._counts = None


class Bias:
    """Logit biases of some rows of a batch; minus infinity bans a token."""

    def __init__(self, draws: Sequence[SamplingParams]) -> None:
        entries = [(row, *entry) for row, sampling in enumerate(draws) for entry in sampling.logit_bias]
        self._rows = np.array([row for row, _, _ in entries], np.int64)
        self._tokens = np.array([token for _, token, _ in entries], np.int64)
        self._values = np.array([value for _, _, value in entries], np.float32)
        self._scatter: tuple[mx.array, mx.array, mx.array] | None = None

    def __call__(self, logits: mx.array) -> mx.array:
        """Return biased `logits`, [rows, vocabulary] float32. Tokens beyond the vocabulary are ignored."""
        if self._scatter is None:
            known = (self._tokens >= 0) & (self._tokens < logits.shape[-1])
            rows, tokens = (mx.array(each[known].astype(np.uint32)) for each in (self._rows, self._tokens))
            self._scatter = rows, tokens, mx.array(self._values[known])
        rows, tokens, values = self._scatter
        return logits.at[rows, tokens].add(values)


def _ids(tokens: Sequence[int], vocabulary: int) -> mx.array:
    # Image placeholders may lie beyond the logits, and MLX does not check where it writes.
    ids = np.asarray(tokens, np.int64)
    return mx.array(ids[(ids >= 0) & (ids < vocabulary)].astype(np.uint32))


def _column(values: Sequence[float]) -> mx.array:
    return mx.array([[value] for value in values], mx.float32)
