"""Draft batch: rows of a draft network that propose together, one token per pass.

Drafts are greedy. The batch's KV cache holds the tokens of each row that the network has read, followed by
the last draft. Accepted draft tokens are reused instead of recomputed where every layer is a KV layer.
Otherwise they are overwritten, and recurrent states are rolled back to before the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from worker.common_prefix import common_prefix_length
from worker.runner.kv.batch import CacheBatch, RowCaches
from worker.runner.kv.buckets import are_similar
from worker.runner.trees import held_bytes

HiddenStates = Mapping[str, mx.array]
NO_HIDDEN_STATES: HiddenStates = {}


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


@dataclass(slots=True, eq=False)
class DraftRow:
    """A row of a draft network. `caches`, and `length`, the number of tokens in them: while the row is in no
    batch. `base`: position of the first. `guessed`: draft tokens behind those read in the batch's caches.
    `scoring`: the unfinished computation of its tokens' importance."""

    name: str
    caches: RowCaches
    length: int = 0
    base: int = 0
    batch: DraftBatch | None = None
    guessed: Sequence[int] = ()
    scoring: Iterator[mx.array | None] | None = None


class DraftBatch:
    """Rows that draft together, in order; None: a hole, until the next `assign`."""

    def __init__(self, network: DraftNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh`: makes empty caches of a single row."""
        self.rows: list[DraftRow | None] = []
        self._network = network
        self._fresh = fresh
        self._batch = CacheBatch(fresh())

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each row has read."""
        return [length for row, length in zip(self.rows, self._batch.lengths, strict=True) if row]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return self._batch.nbytes

    def length(self, row: DraftRow) -> int:
        """Return the number of tokens that a row has read."""
        return self._batch.lengths[self.rows.index(row)]

    def assign(self, joining: Sequence[DraftRow]) -> None:
        """Remove holes and add the `joining` rows."""
        leaving = [index for index, row in enumerate(self.rows) if row is None]
        if not joining and not leaving:
            return
        order = self._batch.rearrange(
            leaving, [row.caches for row in joining], [row.length for row in joining]
        )
        self.rows = [[*self.rows, *joining][index] for index in order]
        for row in joining:
            row.batch, row.caches = self, []

    def take(self, row: DraftRow) -> None:
        """Remove a row from the batch, with its caches."""
        index = self.rows.index(row)
        row.length = self._batch.lengths[index]
        row.caches = self._batch.extract(index, self._fresh())
        self.leave(row)

    def leave(self, row: DraftRow) -> None:
        """Remove a row."""
        self.rows[self.rows.index(row)] = None
        row.batch, row.guessed = None, ()

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int, heard: HiddenStates) -> mx.array:
        """Draft `count` tokens behind the `new_tokens` of each row, [rows, count], lazily; results of rows
        without news are arbitrary. `heard`: the hidden states before each token of the news, [tokens,
        width]."""
        feed, network = self._feed(new_tokens, heard), self._network
        thoughts = self._fed(feed.tokens, feed.before, feed.counts)
        self._batch.commit(feed.kept)
        lasts = mx.array([count - 1 for count in feed.counts])[:, None, None]
        hidden = mx.take_along_axis(thoughts, lasts, axis=1)
        guesses, saved = [network.greedy_token(hidden)], self._batch.checkpoint()
        ones = [1] * len(self.rows)
        for _ in range(count - 1):
            hidden = self._fed(guesses[-1], hidden, ones)
            self._batch.commit(ones)
            guesses.append(network.greedy_token(hidden))
        self._batch.rollback(saved)
        found = mx.concatenate(guesses, axis=1)
        mx.async_eval(found, self._batch.state)
        return found

    def read_drafts(self, drafts: mx.array, wanted: Container[str]) -> dict[str, Sequence[int]]:
        """Return the last draft of each row in `wanted`, by name, and note what is in the caches."""
        told: Any = drafts.tolist()
        found: dict[str, Sequence[int]] = {}
        for row, tokens in zip(self.rows, told, strict=True):
            if row is None:
                continue
            is_wanted = row.name in wanted
            # The last draft token was not fed.
            row.guessed = tokens[:-1] if is_wanted and not self._batch.has_states else ()
            if is_wanted:
                found[row.name] = tokens
        return found

    def _feed(self, new_tokens: Mapping[str, Sequence[int]], heard: HiddenStates) -> DraftInput:
        """Return what the rows are fed: their unread tokens, padded."""
        wanted = [new_tokens.get(row.name, ()) if row else () for row in self.rows]
        # New tokens, the last excepted, may be in the caches already as accepted draft tokens.
        known = [
            common_prefix_length(row.guessed, new[:-1]) if row else 0
            for row, new in zip(self.rows, wanted, strict=True)
        ]
        self._batch.skip(known)
        feeds = [new[count:] for new, count in zip(wanted, known, strict=True)]
        counts = [len(feed) or 1 for feed in feeds]
        padded = mx.array([[*feed, *[0] * (max(counts) - len(feed))] for feed in feeds], mx.uint32)
        before = self._padded(heard, known, max(counts)) if heard else None
        return DraftInput(padded, before, counts, [len(feed) for feed in feeds])

    def _padded(self, heard: HiddenStates, known: Sequence[int], width: int) -> mx.array:
        """Return the hidden states before the tokens that each row is fed, [rows, width, …]."""
        like = next(iter(heard.values()))
        rows = [
            heard[row.name][count:] if row and row.name in heard else like[:0]
            for row, count in zip(self.rows, known, strict=True)
        ]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in rows])

    def _fed(self, tokens: mx.array, before: mx.array | None, counts: Sequence[int]) -> mx.array:
        self._batch.begin(counts)
        bases = mx.array([row.base if row else 0 for row in self.rows], mx.int32)
        starts = mx.array(self._batch.lengths, mx.int32) + bases
        positions = starts[:, None] + mx.arange(tokens.shape[1], dtype=mx.int32)
        thoughts = self._network.forward(tokens, before, positions, self._batch.caches)
        self._batch.finish()
        return thoughts


class DraftBatches:
    """All rows of a draft network: in batches of similar length, or with caches of their own."""

    def __init__(self, network: DraftNetwork, fresh: Callable[[], RowCaches]) -> None:
        """`fresh`: makes empty caches of a single row."""
        self._network = network
        self._fresh = fresh
        self._rows: dict[str, DraftRow] = {}
        self._batches: list[DraftBatch] = []

    def length(self, name: str) -> int:
        """Return the number of tokens that the row has read; 0 if it is unknown."""
        row = self._rows.get(name)
        if row is None:
            return 0
        return row.length if row.batch is None else row.batch.length(row)

    def begin(self, name: str, base: int) -> None:
        """Start a row anew; its first token is at position `base`."""
        self.drop(name)
        self.row(name).base = base

    def row(self, name: str) -> DraftRow:
        """Return a row; a new one if it is unknown."""
        if name not in self._rows:
            self._rows[name] = DraftRow(name, self._fresh())
        return self._rows[name]

    def read(self, name: str, tokens: Sequence[int], before: mx.array | None = None) -> None:
        """Run the next tokens of a row. `before`: the hidden state before each, [tokens, width]."""
        row = self.row(name)
        if row.batch is not None:
            row.batch.take(row)
            self._drop_empty()
        first = row.base + row.length
        positions = mx.arange(first, first + len(tokens), dtype=mx.int32)[None]
        fed, heard = mx.array([list(tokens)], mx.uint32), None if before is None else before[None]
        self._network.forward(fed, heard, positions, row.caches)
        mx.eval([cache.state for cache in row.caches])
        row.length += len(tokens)

    def draft(
        self, new_tokens: Mapping[str, Sequence[int]], count: int, heard: HiddenStates = NO_HIDDEN_STATES
    ) -> Mapping[str, Sequence[int]]:
        """Draft for the rows in `new_tokens`; see `DraftBatch.draft`."""
        self._join(new_tokens)
        asked = [
            batch for batch in self._batches if any(row and row.name in new_tokens for row in batch.rows)
        ]
        found = [(batch, batch.draft(new_tokens, count, heard)) for batch in asked]
        guesses: dict[str, Sequence[int]] = {}
        for batch, drafts in found:
            guesses |= batch.read_drafts(drafts, new_tokens)
        return guesses

    def _join(self, names: Iterable[str]) -> None:
        """Put every row into a batch of rows of similar length."""
        joining: list[list[DraftRow]] = [[] for _ in self._batches]
        lengths = [batch.lengths for batch in self._batches]
        for row in map(self.row, names):
            if row.batch is not None:
                continue
            fitting = (i for i, others in enumerate(lengths) if are_similar([*others, row.length]))
            index = next(fitting, len(lengths))
            if index == len(lengths):
                self._batches.append(DraftBatch(self._network, self._fresh))
                lengths.append([])
                joining.append([])
            lengths[index].append(row.length)
            joining[index].append(row)
        for batch, rows in zip(self._batches, joining, strict=True):
            batch.assign(rows)

    def drop(self, name: str) -> None:
        """Drop a row; unknown rows are ignored."""
        row = self._rows.pop(name, None)
        if row is not None and row.batch is not None:
            row.batch.leave(row)
            self._drop_empty()

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if any(batch.rows)]

    def clear(self) -> None:
        """Drop every row."""
        self._rows.clear()
        self._batches.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        own = sum(held_bytes(cache) for row in self._rows.values() for cache in row.caches)
        return own + sum(batch.nbytes for batch in self._batches)
