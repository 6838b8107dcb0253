"""Interfaces of draft proposers, used by the scheduler. Like `worker.contract.engine`, without MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

NO_DRAFTS: Mapping[str, Sequence[int]] = {}

PRICED_COLUMNS = 5
"""Number of tokens per row in the measurement of a verify step's cost."""
BACKLOG_MAX = 8
"""Maximum number of unread tokens of a row with which it may be drafted for."""


class DraftProposer(Protocol):
    """Draft network with its own row (and cache) for each row of the engine, under the same name.

    Used by the model thread only. Draft tokens change the speed, never the output.
    """

    relative_cost: float
    """Cost of one draft pass, relative to one token of the target model."""
    block: int
    """Maximum number of tokens that one pass drafts for a row."""

    def knows(self, row: str) -> bool:
        """Return whether the row's unread tokens can still be read."""

    def length(self, row: str) -> int:
        """Return the number of the row's tokens that are read, or skipped for good; 0 for a new row."""

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """Prefill the next tokens of a row. Returns when they are computed."""

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """Return up to `count` draft tokens for each row in `new_tokens`. `new_tokens`: each row's unread
        tokens, 1 to `BACKLOG_MAX`, which are read now."""

    def drop(self, row: str) -> None:
        """Drop a row. Unknown rows are no error."""

    def reset(self) -> None:
        """Drop all rows."""

    def cache_bytes(self) -> int:
        """Return the bytes of all rows' caches."""

    def row_bytes(self, tokens: int) -> int:
        """Return the cache bytes of a row of `tokens` tokens."""


class ImportanceScorer(DraftProposer, Protocol):
    """Drafter that also scores the importance of prompt tokens, for sparse prefill."""

    def score_tokens(self, row: str, last: int) -> Sequence[float] | None:
        """Return the importance of each token that the row has read, for the tokens after `last`, the next
        token. None: incomplete, after about one step's work; call again. The row does not change."""
