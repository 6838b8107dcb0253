"""Multi-token prediction (MTP): layers that ship with a model's weights and draft from its hidden states.

The layers are fed a token and the hidden state of the token before it: the model's first, then their own.
Hidden states are buffered until the layers read them, for the last tokens only. After a gap the layers start
anew, and draft slightly worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from worker.runner.drafters.draft_batch import DraftBatches
from worker.runner.kv.batch import RowCaches
from worker.runner.kv.buckets import capacity


class Tap(nn.Module):
    """Wrapper around a module that keeps its last output."""

    def __init__(self, module: nn.Module) -> None:
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.module = module
        self._last: mx.array | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self.module(*arguments, **named)
        self._last = found
        return found

    def __getattr__(self, name: str) -> Any:
        # Models read attributes of their layers, for instance which of them have a window.
        if name in self:
            return self[name]
        if "module" not in self:
            raise AttributeError(name)
        return getattr(self["module"], name)

    @property
    def last(self) -> mx.array:
        """The last output, [rows, tokens, width]."""
        assert self._last is not None, "the module has not been run"
        return self._last


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
    """Hidden states of a row from position `first` on, in parts: each an array, [rows, tokens, width], the
    row's index in it, and the tokens from and to which they are the row's. They are sliced when they are
    read, because most never are."""

    first: int
    parts: list[tuple[mx.array, int, int, int]] = field(default_factory=list)
    count: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    def add(self, states: mx.array, index: int, begin: int, end: int) -> None:
        self.parts.append((states, index, begin, end))
        self.count += end - begin

    def take(self, count: int) -> mx.array:
        """Remove and return the first `count` hidden states, [count, width]."""
        whole = mx.concatenate([states[index, begin:end] for states, index, begin, end in self.parts])
        left = self.count - count
        # A slice would keep all of it alive.
        rest = mx.take(whole, mx.arange(count, self.count), axis=0)[None] if left else None
        self.parts = [] if rest is None else [(rest, 0, 0, left)]
        self.first, self.count = self.first + count, left
        return whole[:count]

    def forget(self, count: int) -> None:
        """Remove the first `count` hidden states."""
        self.first, self.count = self.first + count, self.count - count
        gone = 0
        for _, _, begin, end in self.parts:
            if count < end - begin:
                break
            gone, count = gone + 1, count - (end - begin)
        del self.parts[:gone]
        if count:
            states, index, begin, end = self.parts[0]
            rest = mx.contiguous(states[index, begin + count : end])[None]
            mx.eval(rest)  # releases the rest
            self.parts[0] = rest, 0, 0, end - begin - count


@dataclass(slots=True)
class MtpRow:
    """A row of the layers."""

    end: int = 0
    """Position behind the last token that the model has run, or that was skipped."""
    heard: HiddenStateBuffer | None = None
    """Hidden states that the layers have not read; None: the model has run nothing since it was skipped."""
    is_read: bool = False
    """Whether the layers have read some since the buffer began."""


class HiddenStateProposer:
    """`DraftProposer` on MTP layers, which is told of each forward pass of the model right after it."""

    def __init__(self, network: MtpNetwork, tap: Tap, relative_cost: float) -> None:
        """`tap`: the tap on the model's hidden states, which has run at least once."""
        self.relative_cost = relative_cost
        self._layers = network
        self._tap = tap
        self._draft_batches = DraftBatches(network, network.fresh)
        self._rows: dict[str, MtpRow] = {}
        self._width, self._value_bytes = tap.last.shape[-1], tap.last.dtype.size

    # --- what the model has run ---

    def on_hidden_states(
        self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None
    ) -> None:
        """Note that the model's last pass ran `counts` tokens of each of `rows`, from the positions `firsts`
        on; None: from where each row was."""
        states = self._tap.last
        for index, (name, count) in enumerate(zip(rows, counts, strict=True)):
            row = self._row(name)
            first = row.end if firsts is None else firsts[index]
            row.end = first + count
            if row.heard is None or first > row.heard.end:
                self._begin(name, row, first)
            assert row.heard is not None
            if row.end > row.heard.end:
                row.heard.add(states, index, row.heard.end - first, count)
            if row.heard.count > 2 * PENDING_TOKENS_MAX:
                row.heard.forget(row.heard.count - PENDING_TOKENS_MAX)
                self._draft_batches.drop(name)
                row.is_read = False

    def _row(self, name: str) -> MtpRow:
        return self._rows.setdefault(name, MtpRow())

    def _begin(self, name: str, row: MtpRow, first: int) -> None:
        """Start the row anew at position `first`: discard the layers' caches."""
        self._draft_batches.drop(name)
        row.heard, row.is_read = HiddenStateBuffer(first), False

    def skip(self, row: str, count: int) -> None:
        """Note that `count` tokens of `row` were run elsewhere, or restored."""
        self._row(row).end += count

    def copy(self, row: str, copy: str) -> None:
        """Begin `copy` at the position of `row`."""
        if row in self._rows:
            own = self._rows[row]
            heard = None if own.heard is None or own.is_read else replace(own.heard, parts=[*own.heard.parts])
            self._rows[copy] = MtpRow(own.end, heard)

    # --- DraftProposer ---

    def knows(self, row: str) -> bool:
        return self._heard(row) is not None

    def _heard(self, row: str) -> HiddenStateBuffer | None:
        return self._rows[row].heard if row in self._rows else None

    def length(self, row: str) -> int:
        """Return one more than the buffer's start: a token is read with the hidden state before it."""
        heard = self._heard(row)
        return 0 if heard is None else heard.first + 1

    def read(self, row: str, tokens: Sequence[int]) -> None:
        heard = self._heard(row)
        assert heard is not None, "the row is known"
        if heard.count < len(tokens):
            self._begin(row, self._rows[row], heard.end)  # a gap: wait for new hidden states
        else:
            self._draft_batches.read(row, tokens, self._taken(row, heard, len(tokens)))

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        known, states = {}, {}
        for row, tokens in new_tokens.items():
            heard = self._heard(row)
            if heard is not None and heard.count >= len(tokens):
                known[row], states[row] = tokens, self._taken(row, heard, len(tokens))
        return self._draft_batches.draft(known, count, states) if known else {}

    def _taken(self, row: str, heard: HiddenStateBuffer, count: int) -> mx.array:
        if not self._rows[row].is_read:
            self._rows[row].is_read = True
            self._draft_batches.begin(row, heard.first)
        return heard.take(count)

    def drop(self, row: str) -> None:
        self._draft_batches.drop(row)
        self._rows.pop(row, None)

    def reset(self) -> None:
        self._draft_batches.clear()
        self._rows.clear()

    def cache_bytes(self) -> int:
        kept = sum(row.heard.count for row in self._rows.values() if row.heard is not None)
        return self._draft_batches.nbytes + kept * self._width * self._value_bytes

    def row_bytes(self, tokens: int) -> int:
        kept = min(tokens, 2 * PENDING_TOKENS_MAX) * self._width
        return (capacity(tokens) * self._layers.cache_values + kept) * self._value_bytes
