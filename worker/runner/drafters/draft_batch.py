"""Draft batch: rows of a draft network that propose together, one token per pass.

Drafts are greedy. The batch's KV cache holds the tokens of each row that the network has read, followed by
the last draft. Accepted draft tokens are reused instead of recomputed where every layer is a KV layer.
Otherwise they are overwritten, and recurrent states are rolled back to before the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from worker.common_prefix import common_prefix_length
from worker.runner.kv.batch import CacheBatch, RowCaches
from worker.runner.kv.buckets import are_similar
from worker.runner.trees import held_bytes

NO_HIDDEN_STATES: Mapping[str, mx.array] = {}


class DraftNetwork(Protocol):
    """A draft network, which proposes one token per pass. Its *hidden state* of a token, [rows, tokens,
    width], is what it predicts the next token from."""

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """Return the hidden states of `tokens`, [rows, tokens], at `positions`, int32. `before`: the hidden
        state of the token before each, its own or the target's; None: not given."""

    def greedy_token(self, hidden: mx.array) -> mx.array:
        """Return the likeliest next token, [rows, 1], from hidden states of [rows, 1, width]."""


class DraftInput(NamedTuple):
    """Tokens that rows have not been fed, [rows, tokens]; the hidden states before each, [rows, tokens,
    width]; the number fed to each row, and how many of these are its own rather than padding."""

    tokens: mx.array
    before: mx.array | None
    counts: list[int]
    kept: list[int]


@dataclass(slots=True)
class DraftSequence:
    """A row outside of a batch: its caches, the number of tokens in them, and the position of the first."""

    caches: RowCaches
    length: int = 0
    base: int = 0


class DraftBatch:
    """Rows that draft together, in the order of `names`; None: a hole, until the next `assign`."""

    def __init__(self, network: DraftNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh`: makes empty caches of a single row."""
        self.names: list[str | None] = []
        self._network = network
        self._fresh = fresh
        self._batch = CacheBatch(fresh())
        self._bases: list[int] = []
        self._guessed: dict[str, Sequence[int]] = {}
        """Draft tokens behind the read tokens in the caches, by row."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each row has read."""
        return [length for name, length in zip(self.names, self._batch.lengths, strict=True) if name]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return self._batch.nbytes

    def length(self, name: str) -> int:
        """Return the number of tokens that a row has read."""
        return self._batch.lengths[self.names.index(name)]

    def assign(self, joining: Mapping[str, DraftSequence]) -> None:
        """Remove holes and add the `joining` rows."""
        leaving = [place for place, name in enumerate(self.names) if name is None]
        if not joining and not leaving:
            return
        seats = joining.values()
        order = self._batch.rearrange(
            leaving, [seat.caches for seat in seats], [seat.length for seat in seats]
        )
        self._bases = [[*self._bases, *(seat.base for seat in seats)][place] for place in order]
        self.names = [[*self.names, *joining][place] for place in order]

    def take(self, name: str) -> DraftSequence:
        """Remove a row from the batch and return it."""
        place = self.names.index(name)
        length, base = self._batch.lengths[place], self._bases[place]
        caches = self._batch.extract(place, self._fresh())
        self.leave(name)
        return DraftSequence(caches, length, base)

    def leave(self, name: str) -> None:
        """Remove a row."""
        self.names[self.names.index(name)] = None
        self._guessed.pop(name, None)

    def draft(
        self,
        new_tokens: Mapping[str, Sequence[int]],
        count: int,
        heard: Mapping[str, mx.array] = NO_HIDDEN_STATES,
    ) -> mx.array:
        """Draft `count` tokens behind the `new_tokens` of each row, [rows, count], lazily; results of rows
        without news are arbitrary. `heard`: the hidden states before each token of the news, [tokens,
        width]."""
        feed, network = self._feed(new_tokens, heard), self._network
        thoughts = self._fed(feed.tokens, feed.before, feed.counts)
        self._batch.commit(feed.kept)
        lasts = mx.array([count - 1 for count in feed.counts])[:, None, None]
        hidden = mx.take_along_axis(thoughts, lasts, axis=1)
        guesses, saved = [network.greedy_token(hidden)], self._batch.checkpoint()
        for _ in range(count - 1):
            hidden = self._fed(guesses[-1], hidden, [1] * len(self.names))
            self._batch.commit([1] * len(self.names))
            guesses.append(network.greedy_token(hidden))
        self._batch.rollback(saved)
        found = mx.concatenate(guesses, axis=1)
        mx.async_eval(found, self._batch.state)
        return found

    def guessed(self, guesses: Mapping[str, Sequence[int]]) -> None:
        """Record the tokens of the last draft."""
        if not self._batch.has_states:
            # The last draft token was not fed.
            self._guessed = {name: all_[:-1] for name, all_ in guesses.items()}

    def _feed(self, new_tokens: Mapping[str, Sequence[int]], heard: Mapping[str, mx.array]) -> DraftInput:
        """Return what the rows are fed: their unread tokens, padded."""
        wanted = [new_tokens.get(name, ()) if name else () for name in self.names]
        known = [self._known(name, new) for name, new in zip(self.names, wanted, strict=True)]
        self._batch.skip(known)
        feeds = [new[count:] for new, count in zip(wanted, known, strict=True)]
        counts = [len(feed) or 1 for feed in feeds]
        padded = mx.array([[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds], mx.uint32)
        before = self._padded(heard, known, max(counts)) if heard else None
        return DraftInput(padded, before, counts, [len(feed) for feed in feeds])

    def _padded(self, heard: Mapping[str, mx.array], known: Sequence[int], width: int) -> mx.array:
        """Return the hidden states before the tokens that each row is fed, [rows, width, …]."""
        like = next(iter(heard.values()))
        rows = [
            heard[name][count:] if name and name in heard else like[:0]
            for name, count in zip(self.names, known, strict=True)
        ]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in rows])

    def _fed(self, tokens: mx.array, before: mx.array | None, counts: Sequence[int]) -> mx.array:
        self._batch.begin(counts)
        thoughts = self._network.forward(tokens, before, self._positions(tokens.shape[1]), self._batch.caches)
        self._batch.finish()
        return thoughts

    def _positions(self, width: int) -> mx.array:
        """Return the positions of the next tokens, [rows, width]."""
        starts = mx.array(self._batch.lengths, mx.int32) + mx.array(self._bases, mx.int32)
        return starts[:, None] + mx.arange(width, dtype=mx.int32)

    def _known(self, name: str | None, new: Sequence[int]) -> int:
        """Count the new tokens, the last excepted, that are in the caches already as accepted draft
        tokens."""
        guessed = self._guessed.get(name, ()) if name else ()
        return common_prefix_length(guessed, new[:-1])


class DraftBatches:
    """All rows of a draft network: in batches of similar length, or with caches of their own."""

    def __init__(self, network: DraftNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh`: makes empty caches of a single row."""
        self._network = network
        self._fresh = fresh
        self._own: dict[str, DraftSequence] = {}
        self._draft_batches: list[DraftBatch] = []

    def length(self, row: str) -> int:
        """Return the number of tokens that the row has read; 0 if it is unknown."""
        if (draft_batch := self._batch_of(row)) is not None:
            return draft_batch.length(row)
        return self._own[row].length if row in self._own else 0

    def begin(self, row: str, base: int) -> None:
        """Start a row anew; its first token is at position `base`."""
        self.drop(row)
        self._own[row] = DraftSequence(self._fresh(), base=base)

    def read(self, row: str, tokens: Sequence[int], before: mx.array | None = None) -> None:
        """Run the next tokens of a row. `before`: the hidden state before each, [tokens, width]."""
        if (draft_batch := self._batch_of(row)) is not None:
            self._own[row] = draft_batch.take(row)
            self._let_go()
        seat = self._own.setdefault(row, DraftSequence(self._fresh()))
        first = seat.base + seat.length
        positions = mx.arange(first, first + len(tokens), dtype=mx.int32)[None]
        fed, heard = mx.array([list(tokens)], mx.uint32), None if before is None else before[None]
        self._network.forward(fed, heard, positions, seat.caches)
        mx.eval([cache.state for cache in seat.caches])
        seat.length += len(tokens)

    def own(self, row: str) -> RowCaches:
        """Return the caches of a row that has read something, and never drafted."""
        caches: RowCaches = self._own[row].caches
        return caches

    def draft(
        self,
        new_tokens: Mapping[str, Sequence[int]],
        count: int,
        heard: Mapping[str, mx.array] = NO_HIDDEN_STATES,
    ) -> Mapping[str, Sequence[int]]:
        """Draft for the rows in `new_tokens`; see `DraftBatch.draft`."""
        self._seat(new_tokens)
        asked = [
            draft_batch
            for draft_batch in self._draft_batches
            if any(name in new_tokens for name in draft_batch.names)
        ]
        found = [(draft_batch, draft_batch.draft(new_tokens, count, heard)) for draft_batch in asked]
        guesses: dict[str, Sequence[int]] = {}
        for draft_batch, each in found:
            told: Any = each.tolist()
            mine = {
                name: row
                for name, row in zip(draft_batch.names, told, strict=True)
                if name and name in new_tokens
            }
            draft_batch.guessed(mine)
            guesses |= mine
        return guesses

    def _seat(self, rows: Iterable[str]) -> None:
        """Put every row into a batch of rows of similar length."""
        joining: dict[int, dict[str, DraftSequence]] = {}
        lengths = [draft_batch.lengths for draft_batch in self._draft_batches]
        for row in rows:
            if self._batch_of(row) is not None:
                continue
            seat = self._own.pop(row, None) or DraftSequence(self._fresh())
            fitting = (i for i, others in enumerate(lengths) if are_similar([*others, seat.length]))
            place = next(fitting, len(lengths))
            if place == len(lengths):
                self._draft_batches.append(DraftBatch(self._network, self._fresh))
                lengths.append([])
            lengths[place].append(seat.length)
            joining.setdefault(place, {})[row] = seat
        for place, draft_batch in enumerate(self._draft_batches):
            draft_batch.assign(joining.get(place, {}))

    def _batch_of(self, row: str) -> DraftBatch | None:
        return next((draft_batch for draft_batch in self._draft_batches if row in draft_batch.names), None)

    def drop(self, row: str) -> None:
        """Drop a row; unknown rows are ignored."""
        self._own.pop(row, None)
        if (draft_batch := self._batch_of(row)) is not None:
            draft_batch.leave(row)
            self._let_go()

    def _let_go(self) -> None:
        """Drop batches without rows."""
        self._draft_batches = [draft_batch for draft_batch in self._draft_batches if any(draft_batch.names)]

    def clear(self) -> None:
        """Drop every row."""
        self._own.clear()
        self._draft_batches.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        own = sum(held_bytes(cache) for seat in self._own.values() for cache in seat.caches)
        return own + sum(draft_batch.nbytes for draft_batch in self._draft_batches)
