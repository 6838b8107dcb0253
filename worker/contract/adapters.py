"""Interface of a model's adapters, which come and go while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from protocol.types import AdapterInfo


class AdapterError(Exception):
    """An adapter cannot be served. The message is for the user: the end of a sentence about it, without the
    folder."""


class AdapterSet(Protocol):
    """The adapters of one model. Used by the model thread only."""

    @property
    def infos(self) -> Sequence[AdapterInfo]:
        """The adapters that rows may use."""

    def load(self, name: str, folder: Path, bytes_max: int) -> AdapterInfo:
        """Load an adapter of at most `bytes_max` bytes. Raises `AdapterError`; nothing has changed then."""

    def unload(self, name: str) -> None:
        """Remove an adapter that no row uses. Unknown ones are no error."""
