"""Draft-model proposer: a small language model that drafts the next tokens of the engine's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.runner.drafters.draft_batch import DraftBatches
from worker.runner.kv.row_caches import row_cost
from worker.runner.token_importance import can_score_tokens, score_tokens_in_parts


class DraftModelProposer:
    """`DraftProposer` on a language model; its logits serve as hidden states."""

    def __init__(self, model: nn.Module, relative_cost: float, vocabulary: int) -> None:
        """`model`: supports ragged steps. `vocabulary`: its number of tokens."""
        self.relative_cost = relative_cost
        self._model = model
        self._last_known = vocabulary - 1
        self._cost = row_cost(model)
        self._draft_batches = DraftBatches(self, partial(make_prompt_cache, model))
        self.can_score_tokens = can_score_tokens(make_prompt_cache(model))
        """Whether `score_tokens` is supported."""

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        # The target may have more logits than the draft model has tokens, and one of those may be sampled.
        logits: mx.array = self._model(mx.minimum(tokens, self._last_known), cache=caches)
        return logits

    def greedy_token(self, hidden: mx.array) -> mx.array:
        return mx.argmax(hidden[:, -1], axis=-1, keepdims=True)

    def knows(self, row: str) -> bool:
        return True

    def length(self, row: str) -> int:
        return self._draft_batches.length(row)

    def read(self, row: str, tokens: Sequence[int]) -> None:
        self._draft_batches.read(row, tokens)

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        return self._draft_batches.draft(new_tokens, count)

    def score_tokens(self, row: str, last: int) -> Sequence[float] | None:
        own = self._draft_batches.row(row)
        if own.scoring is None:
            own.scoring = score_tokens_in_parts(self._model, own.caches, last)
        scores = next(own.scoring)
        if scores is None:
            return None
        own.scoring = None
        found: Any = scores.tolist()
        return list(found)

    def drop(self, row: str) -> None:
        self._draft_batches.drop(row)

    def reset(self) -> None:
        self._draft_batches.clear()

    def cache_bytes(self) -> int:
        return self._draft_batches.nbytes

    def row_bytes(self, tokens: int) -> int:
        return self._cost(tokens)
