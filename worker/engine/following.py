"""A draft model: its rows read what rows of the engine say, and guess how that goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.caches.cost import row_cost
from worker.engine.flock import Flocks
from worker.engine.weighing import can_weigh, weighing


class Followers:
    """`drafts.Drafter` on a language model, whose thoughts are its logits."""

    block = 1
    keeps = True

    def __init__(self, model: nn.Module, share: float, vocabulary: int) -> None:
        """`model`: its rows can be fed ahead. `vocabulary`: it knows so many tokens."""
        self.share = share
        self._model = model
        self._last_known = vocabulary - 1
        self._cost = row_cost(model)
        self._flocks = Flocks(self, partial(make_prompt_cache, model))
        self.can_weigh = can_weigh(make_prompt_cache(model))
        """Whether `weigh` can be asked."""
        self._weighing: dict[str, Iterator[Any]] = {}
        """What is left to be done, of rows that are being weighed."""

    def think(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """See `guessing.Network`."""
        # There may be more logits than tokens, and some day one of those is drawn.
        logits: mx.array = self._model(mx.minimum(tokens, self._last_known), cache=caches)
        return logits

    def speak(self, thought: mx.array) -> mx.array:
        """See `guessing.Network`."""
        return mx.argmax(thought[:, -1], axis=-1, keepdims=True)

    def knows(self, row: str) -> bool:
        """See `Drafter`."""
        return True

    def length(self, row: str) -> int:
        """See `Drafter`."""
        return self._flocks.length(row)

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._flocks.read(row, tokens)

    def draft(self, news: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """See `Drafter`."""
        return self._flocks.draft(news, count)

    def weigh(self, row: str, last: int) -> Sequence[float] | None:
        """See `drafts.Weigher`."""
        if row not in self._weighing:
            self._weighing[row] = weighing(self._model, self._flocks.own(row), last)
        weights = next(self._weighing[row])
        if weights is None:
            return None
        del self._weighing[row]
        return list(weights.tolist())

    def drop(self, row: str) -> None:
        """See `Drafter`."""
        self._weighing.pop(row, None)
        self._flocks.drop(row)

    def reset(self) -> None:
        """See `Drafter`."""
        self._weighing.clear()
        self._flocks.clear()

    def cache_bytes(self) -> int:
        """See `Drafter`."""
        return self._flocks.nbytes

    def row_bytes(self, tokens: int) -> int:
        """See `Drafter`."""
        return self._cost(tokens)
