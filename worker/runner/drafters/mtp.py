"""Multi-token prediction (MTP): layers that ship with a model's weights and draft from its hidden states.

The layers are fed a token and the hidden state of the token before it: the model's first, then their own.
Hidden states are buffered until the layers read them, for the last tokens only. After a gap the layers start
anew, and draft slightly worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from worker.runner.drafters.draft_batch import DraftBatches
from worker.runner.drafters.hidden_states import Tap
from worker.runner.kv.batch import RowCaches
from worker.runner.kv.buckets import capacity

PENDING_TOKENS_MAX = 512
"""Number of recent hidden states kept of a row that the layers do not read."""


class MtpNetwork:
    """`DraftNetwork` of a model's MTP layers (`mtp.*` of Qwen3.5), on mlx-vlm's module without its decoding
    loop. They read the hidden states that the output layer gets, at the positions of their tokens."""

    def __init__(self, module: Any, language: nn.Module) -> None:
        """`module`: a `Qwen3_5MTPDraftModel`. `language`: the model that provides the embedding and the
        output layer."""
        self._module = module
        self._embedding: Any = language.model.embed_tokens
        self._head: Any = getattr(language, "lm_head", None) or self._embedding.as_linear
        attention = module.layers[0].self_attn
        self.cache_values: int = 2 * attention.num_key_value_heads * attention.head_dim * len(module.layers)
        """Values that a token takes in the caches."""

    def fresh(self) -> RowCaches:
        """Return empty caches of a single row."""
        return [KVCache() for _ in self._module.layers]

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        assert before is not None, "hidden states are required"
        module = self._module
        embedded = module.pre_fc_norm_embedding(self._embedding(tokens))
        hidden = module.fc(mx.concatenate([embedded, module.pre_fc_norm_hidden(before)], axis=-1))
        for layer, cache in zip(module.layers, caches, strict=True):
            mask = create_attention_mask(hidden, cache)
            hidden = layer(hidden, mask=mask, cache=cache, position_ids=positions)
        normed: mx.array = module.norm(hidden)
        return normed

    def greedy_token(self, hidden: mx.array) -> mx.array:
        return mx.argmax(self._head(hidden), axis=-1)


@dataclass(slots=True)
class HiddenStateBuffer:
    """The buffered hidden states from position `first` on, in parts, [tokens, width] each."""

    first: int
    parts: list[mx.array] = field(default_factory=list)
    count: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, part: mx.array) -> None:
        self.parts.append(part)
        self.count += part.shape[0]

    def take(self, count: int) -> mx.array:
        """Remove and return the first `count` hidden states, [count, width]."""
        whole = mx.concatenate(self.parts)
        # A slice would keep all of it alive.
        self.parts = [mx.take(whole, mx.arange(count, self.count), axis=0)] if count < self.count else []
        self.first, self.count = self.first + count, self.count - count
        return whole[:count]

    def copy(self) -> HiddenStateBuffer:
        return HiddenStateBuffer(self.first, list(self.parts), self.count)


class HiddenStateProposer:
    """`DraftProposer` on MTP layers; also their `HiddenStateSink`."""

    def __init__(self, network: MtpNetwork, tap: Tap, relative_cost: float) -> None:
        """`tap`: the tap on the model's hidden states, which has run at least once."""
        self.relative_cost = relative_cost
        self._layers = network
        self._tap = tap
        self._draft_batches = DraftBatches(network, network.fresh)
        self._pending_states: dict[str, HiddenStateBuffer] = {}
        self._bases: dict[str, int] = {}
        """Position of the first hidden state that the layers read, by row."""
        self._ends: dict[str, int] = {}
        self._width, self._value_bytes = tap.last.shape[-1], tap.last.dtype.size

    # --- HiddenStateSink ---

    def on_hidden_states(
        self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None
    ) -> None:
        firsts = [self._ends.get(row, 0) for row in rows] if firsts is None else firsts
        states = self._tap.last
        for place, (row, count, first) in enumerate(zip(rows, counts, firsts, strict=True)):
            self._on_hidden_states(row, states[place, :count], first)

    def _on_hidden_states(self, row: str, states: mx.array, first: int) -> None:
        self._ends[row] = first + states.shape[0]
        heard = self._pending_states.get(row)
        if heard is None or first > heard.end:
            heard = self._begin(row, HiddenStateBuffer(first))
        if self._ends[row] > heard.end:
            heard.add(states[heard.end - first :])
        if heard.count > 2 * PENDING_TOKENS_MAX:
            heard.take(heard.count - PENDING_TOKENS_MAX)
            mx.eval(heard.parts)  # releases the rest
            self._begin(row, heard)

    def _begin(self, row: str, heard: HiddenStateBuffer) -> HiddenStateBuffer:
        """Start the row anew with the buffer `heard`: discard the layers' caches."""
        self._draft_batches.drop(row)
        self._bases.pop(row, None)
        self._pending_states[row] = heard
        return heard

    def skip(self, row: str, count: int) -> None:
        self._ends[row] = self._ends.get(row, 0) + count

    def copy(self, row: str, copy: str) -> None:
        if row in self._ends:
            self._ends[copy] = self._ends[row]
        if row in self._pending_states and row not in self._bases:
            self._pending_states[copy] = self._pending_states[row].copy()

    # --- DraftProposer ---

    def knows(self, row: str) -> bool:
        return row in self._pending_states

    def length(self, row: str) -> int:
        """Return one more than the buffer's start: a token is read with the hidden state before it."""
        return self._pending_states[row].first + 1 if row in self._pending_states else 0

    def read(self, row: str, tokens: Sequence[int]) -> None:
        if self._pending_states[row].count < len(tokens):
            self._begin(
                row, HiddenStateBuffer(self._pending_states[row].end)
            )  # a gap: wait for new hidden states
            return
        self._draft_batches.read(row, tokens, self._taken(row, len(tokens)))

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        known = {
            row: tokens
            for row, tokens in new_tokens.items()
            if self._pending_states[row].count >= len(tokens)
        }
        heard = {row: self._taken(row, len(tokens)) for row, tokens in known.items()}
        return self._draft_batches.draft(known, count, heard) if known else {}

    def _taken(self, row: str, count: int) -> mx.array:
        heard = self._pending_states[row]
        if row not in self._bases:
            self._bases[row] = heard.first
            self._draft_batches.begin(row, heard.first)
        return heard.take(count)

    def drop(self, row: str) -> None:
        self._draft_batches.drop(row)
        for known in (self._pending_states, self._bases, self._ends):
            known.pop(row, None)

    def reset(self) -> None:
        self._draft_batches.clear()
        for known in (self._pending_states, self._bases, self._ends):
            known.clear()

    def cache_bytes(self) -> int:
        kept = sum(heard.count for heard in self._pending_states.values())
        return self._draft_batches.nbytes + kept * self._width * self._value_bytes

    def row_bytes(self, tokens: int) -> int:
        kept = min(tokens, 2 * PENDING_TOKENS_MAX) * self._width
        return (capacity(tokens) * self._layers.cache_values + kept) * self._value_bytes
