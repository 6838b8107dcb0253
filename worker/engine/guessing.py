"""What rows that guess together ask of the network that guesses."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx


class Reader(Protocol):
    """What guesses. A *thought* is what it has of a token, [rows, tokens, width], and what it guesses by."""

    def think(
        self, tokens: mx.array, before: mx.array | None, positions: mx.array, caches: list[Any]
    ) -> mx.array:
        """Thoughts of [rows, tokens], which stand at these positions, int32. `before`: what was thought, by
        itself or by another model, of the token before each; None: nobody has told."""


class Network(Reader, Protocol):
    """Guesses one token after the other."""

    keeps: bool
    """A token that it guessed stands in its caches as if it had been read."""

    def speak(self, thought: mx.array) -> mx.array:
        """The likeliest token behind each, [rows, 1], of [rows, 1, width]."""


class Feed(NamedTuple):
    """What rows have not read yet: [rows, tokens], what was thought before each, [rows, tokens, width], how
    many are fed of each row, and how many of these are its own."""

    tokens: mx.array
    before: mx.array | None
    counts: list[int]
    kept: list[int]


@runtime_checkable
class BlockNetwork(Reader, Protocol):
    """Guesses a row's next tokens in one pass, and keeps nothing of it but what was fed."""

    block: int
    """So many at the most."""

    def guess(self, feed: Feed, positions: mx.array, caches: list[Any], count: int) -> mx.array:
        """Reads what is fed, which stands at these positions, [rows, tokens]; so many tokens behind it, or
        as many as it can, [rows, count]."""
