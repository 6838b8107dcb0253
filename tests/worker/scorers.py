"""Base of the scripted importance scorers, which propose no drafts and use no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Weigher:
    """An importance scorer. `read_of`: the tokens read of each row; `dropped`: the dropped rows."""

    read_of: dict[str, list[int]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    relative_cost = 0.1

    def knows(self, row: str) -> bool:
        return True

    def length(self, row: str) -> int:
        return len(self.read_of.get(row, ()))

    def read(self, row: str, tokens: Sequence[int]) -> None:
        self.read_of.setdefault(row, []).extend(tokens)

    def draft(self, new_tokens: object, count: int) -> dict[str, Sequence[int]]:
        return {}

    def drop(self, row: str) -> None:
        self.dropped.append(row)

    def reset(self) -> None:
        self.read_of.clear()

    def cache_bytes(self) -> int:
        return 0

    def row_bytes(self, tokens: int) -> int:
        return 0
