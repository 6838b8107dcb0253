"""The batch of one model: rows prefilled alone, then decoded together, on upstream's per-layer caches.

A row is in one of three places: *prefilling*, with caches of its own; *joining*, started since the last
step; or *in the batch*. What must hold: the caches of the batch, its pending tokens, draws and positions have
one entry per row, in one order. A row dropped from the batch leaves a hole there until the next step, which
closes all holes and takes in all joining rows at once, because each change copies the caches.

Decoding is double-buffered: `step` starts the forward pass that consumes the pending tokens before it reads
them, so the device works while the tokens are handled. One pass is wasted when a row ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract import Draw
from worker.sampling import Sampler

TOKENS_PER_CLEAR = 256
"""How deep the batch advances before buffers that are kept for reuse are given back to the system."""

Caches = list[Any]
"""One cache per layer, of whatever classes upstream's model makes."""


@dataclass(slots=True)
class _Row:
    """A row of the batch, or about to join it. `position`: the index of its pending token in its sequence."""

    name: str | None
    draw: Draw
    position: int


@dataclass(slots=True)
class _Joining:
    """A started row before it is in the batch. `token`: [1], what it drew, maybe not computed yet."""

    row: _Row
    token: mx.array
    caches: Caches


class BatchEngine:
    """`contract.Engine` on MLX. A model that is not `is_batchable` can hold one started row at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prefilling: dict[str, Caches] = {}
        self._joining: list[_Joining] = []
        self._advanced = 0
        self._empty()

    def _empty(self) -> None:
        self._rows: list[_Row] = []
        self._caches: Caches = []
        self._merged = False  # a row that is alone keeps its own caches: they are quicker than a batch of one
        self._tokens = mx.array([], mx.uint32)
        self._sampler = Sampler([])

    def prefill(self, row: str, tokens: Sequence[int]) -> None:
        """See `contract.Engine`. Returns when the chunk is computed."""
        caches = self._prefilling.get(row)
        if caches is None:
            caches = self._prefilling[row] = make_prompt_cache(self._model)
        self._model(mx.array([list(tokens)], mx.uint32), cache=caches)
        mx.eval(_state(caches))
        self._advance(len(tokens))

    def start(self, row: str, token: int, position: int, draw: Draw) -> None:
        """See `contract.Engine`. Returns at once; the first token is read by the next step."""
        caches = self._prefilling.pop(row, None) or make_prompt_cache(self._model)
        logits = self._model(mx.array([[token]], mx.uint32), cache=caches)[:, -1, :]
        first = Sampler([draw])(logits, [position])
        mx.async_eval(first, _state(caches))
        self._joining.append(_Joining(_Row(row, draw, position), first, caches))

    def step(self) -> Mapping[str, int]:
        """See `contract.Engine`. Waits for the tokens that the last step, or `start`, set out to compute."""
        self._close_holes()
        self._take_in()
        if not self._rows:
            return {}
        pending = self._tokens
        for row in self._rows:
            row.position += 1
        logits = self._model(pending[:, None], cache=self._caches)[:, -1, :]
        self._tokens = self._sampler(logits, [row.position for row in self._rows])
        # Offsets and paddings grow by one lazy addition a step; unless evaluated here, they would pile up.
        mx.async_eval(self._tokens, _state(self._caches))
        drawn = cast("list[int]", pending.tolist())
        self._advance(1)
        return {row.name: token for row, token in zip(self._rows, drawn, strict=True) if row.name is not None}

    def drop(self, row: str) -> None:
        """See `contract.Engine`."""
        self._prefilling.pop(row, None)
        self._joining = [joining for joining in self._joining if joining.row.name != row]
        for member in self._rows:
            if member.name == row:
                member.name = None
        if all(member.name is None for member in self._rows):
            self._empty()

    def reset(self) -> None:
        """See `contract.Engine`."""
        self._prefilling.clear()
        self._joining.clear()
        self._empty()
        mx.clear_cache()

    def cache_bytes(self) -> int:
        """See `contract.Engine`. Counts buffers as they are allocated; evaluates nothing."""
        everywhere = [
            *self._prefilling.values(),
            *(joining.caches for joining in self._joining),
            self._caches,
        ]
        return sum(cache.nbytes for caches in everywhere for cache in caches)

    def _close_holes(self) -> None:
        kept = [index for index, row in enumerate(self._rows) if row.name is not None]
        if len(kept) == len(self._rows):
            return
        indices = mx.array(kept, mx.int32)
        for cache in self._caches:
            cache.filter(indices)
        self._tokens = self._tokens[indices]
        self._seat([self._rows[index] for index in kept])

    def _take_in(self) -> None:
        joining, self._joining = self._joining, []
        if not joining:
            return
        if not self._rows and len(joining) == 1:
            self._caches = joining[0].caches
        elif not self._merged:
            alone = [self._caches] if self._rows else []
            self._caches = _merge([*alone, *(row.caches for row in joining)])
            self._merged = True
        else:
            for cache, other in zip(self._caches, _merge([row.caches for row in joining]), strict=True):
                cache.extend(other)
        self._tokens = mx.concatenate([self._tokens, *(row.token for row in joining)])
        self._seat([*self._rows, *(row.row for row in joining)])

    def _seat(self, rows: list[_Row]) -> None:
        self._rows = rows
        self._sampler = Sampler([row.draw for row in rows])

    def _advance(self, tokens: int) -> None:
        # Clearing costs every later step its warm buffers, never clearing keeps those of outgrown caches.
        self._advanced += tokens
        if self._advanced >= TOKENS_PER_CLEAR:
            self._advanced = 0
            mx.clear_cache()


def is_batchable(model: nn.Module) -> bool:
    """Whether the caches of every layer can be merged, extended and filtered: found by doing it."""
    try:
        batch, other = (_merge([make_prompt_cache(model) for _ in range(2)]) for _ in range(2))
        for cache, joining in zip(batch, other, strict=True):
            cache.extend(joining)
            cache.filter(mx.array([0, 2], mx.int32))
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return False
    return True


def _merge(rows: Sequence[Caches]) -> Caches:
    """Caches of single rows -> caches of one batch, layer by layer."""
    return [layer[0].merge(layer) for layer in map(list, zip(*rows, strict=True))]


def _state(caches: Caches) -> list[Any]:
    return [cache.state for cache in caches]
