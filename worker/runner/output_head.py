"""Output head of a model, applied to the last position of each row only.

Upstream's models apply it to every position of a pass. It is as large as the vocabulary is, and of a prompt
only the logits behind the last token are sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_HEADS = ("lm_head", "embed_out")
"""Upstream's names that only heads with weights of their own have; most others are the embedding's
`as_linear`. One of another name makes the logits of all positions."""


class OutputHead:
    """The output head of one model, which is looked for when it is first used."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def last_logits(self, tokens: mx.array, counts: Sequence[int], **inputs: Any) -> mx.array:
        """Run a forward pass; return the logits behind each row's last token, [rows, vocabulary], lazily.

        `tokens`: [rows, width], padded on the right; `counts`: tokens of each row. `inputs`: as the model's.
        """
        with self._reading(counts):
            logits: mx.array = self._model(tokens, **inputs)
        # A head that was not found has made those of all positions.
        return (logits if logits.shape[1] == 1 else _last(logits, counts))[:, 0]

    @cached_property
    def _own(self) -> list[tuple[Any, str]]:
        """The heads with weights of their own, by their owners."""
        owners = self._model.modules()
        return [(owner, name) for owner in owners for name in _HEADS if isinstance(owner.get(name), _LINEAR)]

    @cached_property
    def _tied(self) -> list[Any]:
        """The embeddings that may be the head."""
        return [module for module in self._model.modules() if hasattr(module, "as_linear")]

    @contextmanager
    def _reading(self, counts: Sequence[int]) -> Iterator[None]:
        """Have the head read the last position of each row only."""
        own = [(owner, name, owner[name]) for owner, name in self._own]
        for owner, name, head in own:
            owner[name] = _LastOnly(head, counts)
        for embedding in self._tied:
            embedding.as_linear = _reading_last(embedding.as_linear, counts)
        try:
            yield
        finally:
            for owner, name, head in own:
                owner[name] = head
            for embedding in self._tied:
                del embedding.as_linear


class _LastOnly(nn.Module):
    """A head that reads the last position of each row."""

    def __init__(self, module: nn.Module, counts: Sequence[int]) -> None:
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.module = module
        self._counts = counts

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.module(_last(hidden, self._counts))
        return logits


def _reading_last(
    head: Callable[[mx.array], mx.array], counts: Sequence[int]
) -> Callable[[mx.array], mx.array]:
    return lambda hidden: head(_last(hidden, counts))


def _last(values: mx.array, counts: Sequence[int]) -> mx.array:
    """Return the values at each row's last position, [rows, 1, …], of [rows, positions, …]."""
    width = values.shape[1]
    if min(counts) == width:
        return values[:, -1:]
    places = mx.array(list(counts), mx.int32)[:, None, None] - 1
    return mx.take_along_axis(values, places, axis=1)
