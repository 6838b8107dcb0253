"""Protocols of draft networks, as draft batches call them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx


class DraftNetwork(Protocol):
    """A draft network. Its *hidden state* of a token, [rows, tokens, width], is what it predicts the next
    token from."""

    def forward(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """Return the hidden states of `tokens`, [rows, tokens], at `positions`, int32. `before`: the hidden
        state of the token before each, its own or the target's; None: not given."""


class AutoregressiveDraft(DraftNetwork, Protocol):
    """A draft network that proposes one token per pass."""

    keeps_draft_kv: bool
    """Whether the cache entries of its draft tokens are as good as those of fed tokens."""

    def greedy_token(self, hidden: mx.array) -> mx.array:
        """Return the likeliest next token, [rows, 1], from hidden states of [rows, 1, width]."""


class DraftInput(NamedTuple):
    """Tokens that rows have not been fed, [rows, tokens]; the hidden states before each, [rows, tokens,
    width]; the number fed to each row, and how many of these are its own rather than padding."""

    tokens: mx.array
    before: mx.array | None
    counts: list[int]
    kept: list[int]


@runtime_checkable
class BlockDraft(DraftNetwork, Protocol):
    """A draft network that proposes a block in one pass, and caches only the tokens that it was fed."""

    block: int
    """Maximum number of draft tokens in a pass."""

    def guess(self, feed: DraftInput, positions: mx.array, caches: list[Any], count: int) -> mx.array:
        """Run `feed` at `positions`, [rows, tokens], and propose at most `count` tokens behind it: [rows,
        count]."""
