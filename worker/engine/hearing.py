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
        self.calls = 0
        """How often it was asked."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self.module(*arguments, **named)
        self._last = found
        self.calls += 1
        return found

    def __getattr__(self, name: str) -> Any:
        # Models look at their layers, for instance at which of them have a window.
        if name in self:
            return self[name]
        if "module" not in self:
            raise AttributeError(name)
        return getattr(self["module"], name)

    @property
    def last(self) -> mx.array:
        """[rows, tokens, width]."""
        assert self._last is not None, "something was run"
        return self._last


class Taps:
    """Several modules that are heard together."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = taps

    @property
    def last(self) -> mx.array:
        """[rows, tokens, width of all], in the order of the taps."""
        return mx.concatenate([tap.last for tap in self._taps], axis=-1)
