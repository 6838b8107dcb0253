"""Decode batch: rows that share a forward pass, with their caches, pending tokens and sampler in one
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.adapters import NO_ADAPTER
from worker.engine.caches.batch import CacheBatch, RowCaches
from worker.engine.caches.spans import NO_GAPS, Gaps
from worker.engine.caches.sparse_rows import with_gaps
from worker.engine.sampling.grammar_masks import Job
from worker.engine.sampling.sampler import Agree, PendingSample, Sampled, Sampler
from worker.engine.sampling.state import SamplingState
from worker.engine.trees import held_bytes


@dataclass(slots=True, eq=False)
class BatchRow:
    """A started row.

    `length`: tokens of its sequence, including the pending one, which is not in its caches yet. `token`: that
    one, [1] uint32, while the row is in no group; `caches` likewise. `shift`: see `VisionNetwork`. `gaps`:
    tokens skipped by sparse prefill. `adapter`: its name.
    """

    name: str
    length: int
    row: SamplingState
    token: mx.array | None
    caches: RowCaches
    shift: int = 0
    gaps: Gaps = NO_GAPS
    adapter: str = NO_ADAPTER
    dropped: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether tokens were skipped."""
        return bool(self.gaps.spans)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in its caches."""
        return self.columns - 1

    @property
    def columns(self) -> int:
        """Number of tokens in its caches once it has been fed the pending one."""
        return self.length - self.gaps.total


def first_sample(member: BatchRow, logits: mx.array, agree: Agree | None) -> Sampled:
    """Sample a row's first token from `logits`, [1, vocabulary], of the pass that fed its pending token. The
    sample is pending from then on."""
    sampler, fed = Sampler([member.row], agree), member.token
    sampled = sampler(logits, [member.length], fed)
    sampler.release()
    member.token, member.length = sampled.tokens, member.length + 1
    return sampled


def shifts_of(members: Sequence[BatchRow]) -> dict[str, mx.array]:
    """Return the position shifts of a multimodal model as keyword arguments; empty if no row has images."""
    if not any(member.shift for member in members):
        return {}
    return {"shifts": mx.array([[member.shift] for member in members], mx.int32)}


class RowBatch:
    """Rows that decode in one forward pass, in order; a dropped row leaves a hole."""

    members: list[BatchRow]

    @property
    def adapters(self) -> list[str]:
        """The adapter of each row."""
        return [member.adapter for member in self.members]

    @property
    def has_holes(self) -> bool:
        return any(member.dropped for member in self.members)

    @property
    def is_abandoned(self) -> bool:
        return all(member.dropped for member in self.members)

    @property
    def living(self) -> list[BatchRow]:
        return [member for member in self.members if not member.dropped]


class DecodeBatch(RowBatch):
    """Rows that decode without drafts. A single row keeps its own caches, which are faster than a batch of
    one."""

    def __init__(self, agree: Agree | None = None, slack: int = 0) -> None:
        """`agree`: see `Sampler`. `slack`: see `BatchPositions`."""
        self.members: list[BatchRow] = []
        self._slack = slack
        self._agree = agree
        self._tokens = mx.array([], mx.uint32)
        self._sampler: Sampler | None = None
        self._drawing: PendingSample | None = None
        self._sampled: Sampled | None = None
        self._own: RowCaches = []
        self._batch: CacheBatch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(held_bytes(cache) for cache in self._own) if self._batch is None else self._batch.nbytes

    def dispatch(self, model: nn.Module) -> Sequence[Job]:
        """Dispatch a forward pass over the pending tokens and the sampling of the next ones, which become
        pending.

        Return the mask jobs that must run first, once the guides have seen all pending tokens; empty if no
        row has a grammar.
        """
        assert self._sampler is not None
        caches = with_gaps(self._own, self.members[0].gaps) if self._batch is None else self._batch.caches
        logits = model(self._tokens[:, None], cache=caches, **shifts_of(self.members))[:, -1, :]
        drawing = self._sampler.begin(logits, [member.length for member in self.members], self._tokens)
        if self._batch is not None:
            self._batch.advance()
        for member in self.members:
            member.length += 1
        # Lazily growing arrays, offsets and paddings for instance, must be evaluated with the step.
        if drawing.questions:
            self._drawing = drawing
            mx.async_eval(drawing.arrays, self._state())
        else:
            self._finish(drawing, self._state())
        return drawing.questions

    def drawn(self) -> Sampled:
        """Return the dispatched samples, after the mask jobs have run."""
        if self._drawing is not None:
            drawing, self._drawing = self._drawing, None
            self._finish(drawing, [])
        assert self._sampled is not None
        sampled, self._sampled = self._sampled, None
        return sampled

    def _finish(self, drawing: PendingSample, state: list[Any]) -> None:
        assert self._sampler is not None
        self._sampled = self._sampler.finish(drawing)
        self._tokens = self._sampled.tokens
        mx.async_eval(self._sampled.tokens, self._sampled.arrays, state)

    def _state(self) -> list[Any]:
        return [cache.state for cache in self._own] if self._batch is None else self._batch.state

    def rearrange(self, joining: Sequence[BatchRow], fresh: Callable[[], RowCaches]) -> None:
        """Remove dropped rows and add the `joining` ones. `fresh`: makes empty caches of a single row."""
        if not joining and not self.has_holes:
            return
        if self._batch is None:
            order = self._rearrange_own(joining, fresh)
        else:
            leaving = [place for place, member in enumerate(self.members) if member.dropped]
            held, gaps = [m.cached_tokens for m in joining], [m.gaps for m in joining]
            order = self._batch.rearrange(leaving, [m.caches for m in joining], held, gaps)
        everybody = [*self.members, *joining]
        tokens = [self._tokens, *(member.token for member in joining if member.token is not None)]
        self._tokens = mx.concatenate(tokens)[mx.array(list(order), mx.int32)] if order else tokens[0][:0]
        self.members = [everybody[row] for row in order]
        for member in joining:
            member.token, member.caches = None, []
        if self._sampler is not None:
            self._sampler.release()
        self._sampler = Sampler([member.row for member in self.members], self._agree)

    def _rearrange_own(self, joining: Sequence[BatchRow], fresh: Callable[[], RowCaches]) -> Sequence[int]:
        """Rearrange at most one row without a batch and the joining ones; return the order of the rows."""
        everybody = [*self.members, *joining]
        caches = [self._own] * len(self.members) + [member.caches for member in joining]
        order = [row for row, member in enumerate(everybody) if not member.dropped]
        kept = [caches[row] for row in order]
        self._own = kept[0] if len(kept) == 1 else []
        if len(kept) > 1:
            self._batch = CacheBatch(fresh(), self._slack)
            seated = [everybody[row] for row in order]
            self._batch.rearrange([], kept, [m.cached_tokens for m in seated], [m.gaps for m in seated])
        return order

    def source(self, member: BatchRow) -> tuple[RowCaches | CacheBatch, int]:
        """Return the caches that a row is in, and its place in them."""
        if self._batch is None:
            return self._own, 0
        return self._batch, self.members.index(member)

    def _give(self, place: int, fresh: Callable[[], RowCaches]) -> None:
        member = self.members[place]
        member.token = self._tokens[place : place + 1]
        member.caches = self._own if self._batch is None else self._batch.extract(place, fresh())

    def detach(self, fresh: Callable[[], RowCaches]) -> list[BatchRow]:
        """Return the rows that are left, each with its token and caches, to join another group."""
        for place, member in enumerate(self.members):
            if not member.dropped:
                self._give(place, fresh)
        if self._sampler is not None:
            self._sampler.release()
        return self.living
