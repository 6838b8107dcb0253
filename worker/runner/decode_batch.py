"""Decode batch: rows that share a forward pass, with their caches, pending tokens and sampler in one order.

A pass feeds each row its pending token, before the host has read it; or, to verify drafts, the tokens that
the caches lack and a draft of what follows. Both write to the same caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.runner.drafters.mtp import HiddenStateProposer
from worker.runner.kv.batch import CacheBatch, RowCaches
from worker.runner.kv.buckets import FED_MAX, Order, are_similar, arrange
from worker.runner.rows import EngineRow
from worker.runner.sampling.grammar_masks import Job, MaskThreads
from worker.runner.sampling.sampler import Agree, PendingSample, Sampled, Sampler
from worker.runner.trees import held_bytes
from worker.runner.verification import AcceptedTokens, FedRow, Verifier


def first_sample(member: EngineRow, logits: mx.array, agree: Agree | None) -> Sampled:
    """Sample a row's first token from `logits`, [1, vocabulary], of the pass that fed its pending token. The
    sample is pending from then on."""
    sampler, fed = Sampler([member.sampling], agree), member.token
    sampled = sampler(logits, [member.length], fed)
    sampler.release()
    member.token, member.length = sampled.tokens, member.length + 1
    return sampled


def shifts_of(members: Sequence[EngineRow]) -> dict[str, mx.array]:
    """Return the position shifts of a multimodal model as keyword arguments; empty if no row has images."""
    if not any(member.shift for member in members):
        return {}
    return {"shifts": mx.array([[member.shift] for member in members], mx.int32)}


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """How the rows of an engine decode. `fresh`: makes empty caches of a single row. `applied`: applies the
    adapters of rows while it is open. `mtp`: the drafter that reads the hidden states of the tokens that stay
    in the caches, if any. `agree`: see `Sampler`. `is_batchable`: rows can share a pass; else each has a
    batch of its own. `is_bucketed`: see `CacheBatch`. `rows_max`, `width_max`: maximum rows of a pass, and
    tokens of a row in it."""

    network: nn.Module
    fresh: Callable[[], RowCaches]
    applied: Callable[[Sequence[str]], AbstractContextManager[None]]
    mtp: HiddenStateProposer | None = None
    agree: Agree | None = None
    is_batchable: bool = True
    is_bucketed: bool = False
    rows_max: int | None = None
    width_max: int = FED_MAX


class OwnCaches:
    """The caches of a single row of a model that cannot be batched, in place of a `CacheBatch`."""

    def __init__(self) -> None:
        self.caches: RowCaches = []

    def rearrange(
        self, leaving: Sequence[int], joining: Sequence[RowCaches], lengths: Sequence[int]
    ) -> Order:
        """Replace the row."""
        self.caches = joining[0] if joining else []
        return arrange(len(leaving), leaving, len(joining))

    def begin(self, counts: Sequence[int], *, may_revert: bool = True) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing: upstream's caches have been advanced."""

    def finish(self) -> list[Any]:
        """Return what must be evaluated with the step."""
        return [cache.state for cache in self.caches]

    @property
    def nbytes(self) -> int:
        return sum(held_bytes(cache) for cache in self.caches)


class DecodeBatch:
    """Rows that decode in one forward pass, in order; a dropped row leaves a hole."""

    def __init__(self, model: DecodeModel) -> None:
        self.members: list[EngineRow] = []
        self._model = model
        self._batch: Any = (
            CacheBatch(model.fresh(), is_bucketed=model.is_bucketed) if model.is_batchable else OwnCaches()
        )
        self._tokens = mx.array([], mx.uint32)
        """The pending token of each row."""
        self._late: list[list[int]] = []
        """Accepted tokens before the pending one that each row's caches lack."""
        self._has_fed = False
        """Whether the pass in flight feeds the last tokens that the host has read."""
        self._drawing: PendingSample | None = None
        self._sampled: Sampled | None = None
        self._use([])

    def _use(self, members: list[EngineRow]) -> None:
        self.members = members
        self._sampler = Sampler([member.sampling for member in members], self._model.agree)
        self._verifier = Verifier(self._sampler, self._model.agree)

    @property
    def has_holes(self) -> bool:
        return any(member.dropped for member in self.members)

    @property
    def is_abandoned(self) -> bool:
        return all(member.dropped for member in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return int(self._batch.nbytes)

    # --- rows ---

    def has_room(self, coming: Sequence[EngineRow], member: EngineRow) -> bool:
        """Return whether a row may join, with the rows `coming` before it."""
        rows = [*(row for row in self.members if not row.dropped), *coming]
        if self._model.rows_max is not None and len(rows) >= self._model.rows_max:
            return False
        if self._model.is_bucketed or not rows:
            return True
        return self._model.is_batchable and are_similar([row.length for row in (*rows, member)])

    def rearrange(self, joining: Sequence[EngineRow]) -> None:
        """Remove dropped rows and add the `joining` ones."""
        if not joining and not self.has_holes:
            return
        leaving = [place for place, member in enumerate(self.members) if member.dropped]
        lengths = [member.length - 1 for member in joining]
        order = self._batch.rearrange(leaving, [member.caches for member in joining], lengths)
        everybody, late = [*self.members, *joining], [*self._late, *([] for _ in joining)]
        tokens = [self._tokens, *(member.token for member in joining if member.token is not None)]
        self._tokens = mx.concatenate(tokens)[mx.array(list(order), mx.int32)] if order else tokens[0][:0]
        self._late = [late[row] for row in order]
        for member in joining:
            member.token, member.caches = None, []
        self._sampler.release()
        self._use([everybody[row] for row in order])

    def source(self, member: EngineRow) -> tuple[RowCaches | CacheBatch, int]:
        """Return the caches that a row is in, up to the last token that was read, and its place in them. They
        are copies where the batch lacks some of these tokens."""
        place = self.members.index(member)
        if not isinstance(self._batch, CacheBatch):
            return self._batch.caches, 0
        if self._has_fed:
            return self._batch, place
        pending: Any = self._tokens[place].item()
        own = self._batch.extract(place, self._model.fresh())
        tokens = mx.array([[*self._late[place], pending]], mx.uint32)
        with self._model.applied([member.adapter]):
            self._model.network(tokens, cache=own, **shifts_of([member]))
        return own, 0

    # --- a plain step ---

    def dispatch(self) -> Sequence[Job]:
        """Dispatch a forward pass over the pending tokens and the sampling of the next ones, which become
        pending.

        Return the mask jobs that must run first, once the guides have seen all pending tokens; empty if no
        row has a grammar.
        """
        names = [member.name for member in self.members]
        self._batch.begin([1] * len(names), may_revert=False)
        logits = self._forward(self._tokens[:, None])[:, -1, :]
        drawing = self._sampler.begin(logits, [member.length for member in self.members], self._tokens)
        # Lazily growing arrays, offsets and paddings for instance, must be evaluated with the step.
        state = self._batch.finish()
        if self._model.mtp is not None:
            firsts = [member.length - 1 for member in self.members]
            self._model.mtp.on_hidden_states(names, [1] * len(names), firsts)
        self._batch.advance()
        self._has_fed = True
        for member in self.members:
            member.length += 1
        if drawing.questions:
            self._drawing = drawing
            mx.async_eval(drawing.arrays, state)
        else:
            self._finish(drawing, state)
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
        self._sampled = self._sampler.finish(drawing)
        self._tokens = self._sampled.tokens
        mx.async_eval(self._sampled.tokens, self._sampled.arrays, state)

    def _forward(self, tokens: mx.array) -> mx.array:
        with self._model.applied([member.adapter for member in self.members]):
            logits: mx.array = self._model.network(
                tokens, cache=self._batch.caches, **shifts_of(self.members)
            )
        return logits

    # --- a step with drafts ---

    def may_verify(self, drafts: Mapping[str, Sequence[int]]) -> bool:
        """Return whether the next step may need the pending tokens to be read first."""
        return any(self._late) or any(drafts.get(m.name) for m in self.members if not m.dropped)

    def verify(self, drafts: Mapping[str, Sequence[int]], helpers: MaskThreads) -> dict[str, AcceptedTokens]:
        """Feed every row its backlog and as much of its draft as fits. Return the accepted tokens of each
        row: at least one, unless it fails. All samples have been read."""
        pending: Any = self._tokens.tolist()
        rows = []
        for member, late, token in zip(self.members, self._late, pending, strict=True):
            backlog = [*late, token]
            guess = drafts.get(member.name, ())
            fits = max(0, self._model.width_max - len(backlog))
            rows.append(FedRow(member.sampling, member.length, backlog, guess[:fits]))
        feeds = [[*fed.backlog, *fed.guess] for fed in rows]
        counts = [len(feed) for feed in feeds]
        self._batch.begin(counts)
        padded = [[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds]
        logits = self._forward(mx.array(padded, mx.uint32))
        mx.async_eval(logits, self._batch.finish())
        accepted = self._verifier.accepted(logits, rows, helpers)
        self._settle(rows, accepted)
        return {member.name: each for member, each in zip(self.members, accepted, strict=True)}

    def _settle(self, rows: Sequence[FedRow], accepted: Sequence[AcceptedTokens]) -> None:
        """Keep the accepted tokens in the caches, or feed them again in the next step."""
        new_tokens = [[drawn.token for drawn in each.drawn] for each in accepted]
        kept = [len(fed.backlog) + max(0, len(new) - 1) for fed, new in zip(rows, new_tokens, strict=True)]
        if self._model.mtp is not None:
            firsts = [
                member.length - len(fed.backlog) for member, fed in zip(self.members, rows, strict=True)
            ]
            names = [member.name for member in self.members]
            self._model.mtp.on_hidden_states(names, kept, firsts)
        taken = self._batch.commit(kept)
        known = [[*fed.backlog, *new] for fed, new in zip(rows, new_tokens, strict=True)]
        self._late = [tokens[count:-1] for tokens, count in zip(known, taken, strict=True)]
        self._tokens = mx.array([tokens[-1] for tokens in known], mx.uint32)
        self._has_fed = False
        for member, new in zip(self.members, new_tokens, strict=True):
            member.length += len(new)
