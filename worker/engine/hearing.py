"""What a model has thought of the tokens that it was fed: told to who guesses by that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class Ear(Protocol):
    """Is told of all that is run of an engine's rows, right after it was."""

    def hear(self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None) -> None:
        """The last pass of the model fed these rows so many tokens each, from these positions on; None: from
        where each stood."""

    def skip(self, row: str, count: int) -> None:
        """So many tokens of a row were run elsewhere, or restored."""

    def copy(self, row: str, copy: str) -> None:
        """`copy` begins where `row` stands."""


class Deaf:
    """Nobody guesses."""

    def hear(self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None) -> None:
        """See `Ear`."""

    def skip(self, row: str, count: int) -> None:
        """See `Ear`."""

    def copy(self, row: str, copy: str) -> None:
        """See `Ear`."""


class Tap(nn.Module):
    """Stands in for a module, and keeps what that gave out last."""

    def __init__(self, module: nn.Module) -> None:
        initialize: Any = super().__init__  # which MLX leaves without types
        initialize()
        self.module = module
        self._last: mx.array | None = None

    def __call__(self, *arguments: Any) -> mx.array:
        found: mx.array = self.module(*arguments)
        self._last = found
        return found

    @property
    def last(self) -> mx.array:
        """[rows, tokens, width]."""
        assert self._last is not None, "something was run"
        return self._last
