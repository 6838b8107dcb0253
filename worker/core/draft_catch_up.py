"""Draft catch-up: lets a draft network draft for rows that it has read, and read the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from worker.core.rows import Row
from worker.interfaces import DraftProposer
from worker.values import BACKLOG_MAX

READ_SHARE = 0.5
"""Share of the inter-token target within which a step and the network's prefill must fit."""
READ_TOKENS_FIRST, READ_TOKENS_MIN, READ_TOKENS_MAX = 64, 16, 2048
"""Tokens of a prefill chunk of the network: at first, and the bounds."""
ANSWER_TOKENS = 256
"""Tokens that a row is expected to answer yet; as many as it has, if more."""
READ_PER_TOKEN = 32
"""Tokens that the network may have to read for each of these: where it is a tenth of the model, and reads ten
times as fast as it drafts, that takes a third of the time."""
MISSED_TOKENS_MAX = 256
"""Tokens of its answer that a row may have got without the network: with more, it goes on without. Otherwise
a network that is tried again would first read all rows' answers."""


class DraftCatchUp:
    """A draft network, which drafts for rows of whose tokens it has read all but a few.

    It reads the others between steps, in chunks small enough that running streams keep their inter-token
    target.
    """

    def __init__(self, drafter: DraftProposer, target_s: float, length: int) -> None:
        """`target_s`: between two tokens of a running stream. `length`: of a draft."""
        self.length = length
        self.cost = drafter.relative_cost * length
        """Cost of the passes of a draft, in plain steps."""
        self._drafter = drafter
        self._read_s = READ_SHARE * target_s
        self._chunk = READ_TOKENS_FIRST
        self._has_read = False

    def knows(self, row: Row) -> bool:
        """Return whether the network could draft for the row once it has read it."""
        # A hidden-state drafter may start at a position whose token has not been reported yet.
        return not row.images and self._drafter.knows(row.id) and self._backlog(row) > 0

    def is_caught_up(self, row: Row) -> bool:
        """Return whether the network could draft for the row at once."""
        return self._backlog(row) <= BACKLOG_MAX

    def _backlog(self, row: Row) -> int:
        return row.length - self._drafter.length(row.id)

    def propose(self, rows: Sequence[Row]) -> Mapping[Row, Sequence[int]]:
        """Draft for rows that are caught up."""
        drafts = self._drafter.draft({row.id: self._unread(row) for row in rows}, self.length)
        return {row: drafts[row.id] for row in rows if row.id in drafts}

    def read(self, rows: Iterable[Row]) -> None:
        """Read a chunk of tokens, of the rows that lack least first, where that is worth the answer."""
        left = self._chunk
        for row in sorted(rows, key=self._backlog):
            if left > 0 and self._is_worth_reading(row):
                tokens = self._unread(row)[:-1][:left]
                self._drafter.read(row.id, tokens)
                left -= len(tokens)
        self._has_read = left < self._chunk

    def _is_worth_reading(self, row: Row) -> bool:
        answered, backlog = len(row.answered), self._backlog(row)
        expected = min(max(ANSWER_TOKENS, answered), row.request.max_tokens - answered)
        return min(backlog, answered) <= MISSED_TOKENS_MAX and backlog <= READ_PER_TOKEN * expected

    def on_step_end(self, seconds: float | None) -> None:
        """Adapt the chunk to the duration of a step in which the network has read; None: unknown."""
        if self._has_read and seconds is not None:
            if seconds > self._read_s:
                self._chunk = max(self._chunk // 2, READ_TOKENS_MIN)
            elif seconds < self._read_s / 2:
                self._chunk = min(self._chunk * 2, READ_TOKENS_MAX)
        self._has_read = False

    def _unread(self, row: Row) -> tuple[int, ...]:
        """Return the row's unread tokens, with all answered ones, which `row.tokens` may lack."""
        read, prompt = self._drafter.length(row.id), row.request.tokens
        return (*prompt[read:], *row.answered[max(0, read - len(prompt)) :])
