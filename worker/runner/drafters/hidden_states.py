"""Delivers the target model's hidden states to drafters that need them (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class HiddenStateSink(Protocol):
    """Receives notice of each forward pass of an engine's rows, right after it."""

    def on_hidden_states(
        self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None
    ) -> None:
        """The model's last pass ran `counts` tokens of each of `rows`, from the positions `firsts` on; None:
        from where each row was."""

    def skip(self, row: str, count: int) -> None:
        """`count` tokens of `row` were run elsewhere, or restored."""

    def copy(self, row: str, copy: str) -> None:
        """`copy` begins at the position of `row`."""


class NullSink:
    """Sink without a drafter: ignores everything."""

    def on_hidden_states(
        self, rows: Sequence[str], counts: Sequence[int], firsts: Sequence[int] | None = None
    ) -> None:
        """Do nothing."""

    def skip(self, row: str, count: int) -> None:
        """Do nothing."""

    def copy(self, row: str, copy: str) -> None:
        """Do nothing."""


class Tap(nn.Module):
    """Wrapper around a module that keeps its last output."""

    def __init__(self, module: nn.Module) -> None:
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.module = module
        self._last: mx.array | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self.module(*arguments, **named)
        self._last = found
        return found

    def __getattr__(self, name: str) -> Any:
        # Models read attributes of their layers, for instance which of them have a window.
        if name in self:
            return self[name]
        if "module" not in self:
            raise AttributeError(name)
        return getattr(self["module"], name)

    @property
    def last(self) -> mx.array:
        """The last output, [rows, tokens, width]."""
        assert self._last is not None, "the module has not been run"
        return self._last
