"""Statistics of the prefix cache: counts since the start, and the most used prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol.types import TopPrefix
from worker.prefixes.items import Block, BlockPart, path_to
from worker.prefixes.matching import Match
from worker.prefixes.tree import snapshots_of

TOP_PREFIXES = 10
_FOLLOWED_MAX = 100


@dataclass(slots=True)
class LookupStats:
    """Hit and miss counts. `misses`: by reason, without positions."""

    count: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    _ends: dict[Block, int] = field(default_factory=dict)
    """Last blocks of matches, with the longest match of each. The least used is dropped when full."""

    def add(self, match: Match, prompt_tokens: int, miss: str) -> None:
        self.count += 1
        self.hits += match.length > 0
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += match.length
        if miss:
            self.misses[miss.partition("_at_")[0]] += 1
        if match.pieces:
            self._follow(match)

    def forget(self, block: Block) -> None:
        """Drop a block that is no longer stored."""
        self._ends.pop(block, None)

    def top(self) -> list[TopPrefix]:
        """Return the most used prefixes, without their text."""
        most = sorted(self._ends, key=lambda block: block.uses, reverse=True)[:TOP_PREFIXES]
        return [_describe(block, self._ends[block]) for block in most]

    def _follow(self, match: Match) -> None:
        *before, last = (part.block for part in match.pieces)
        for block in before:
            if not block.is_shared:  # an earlier turn of the same conversation
                self._ends.pop(block, None)
        self._ends[last] = max(match.length, self._ends.get(last, 0))
        if len(self._ends) > _FOLLOWED_MAX:
            del self._ends[min(self._ends, key=lambda block: block.uses)]


def _describe(block: Block, length: int) -> TopPrefix:
    path = [BlockPart(block, length - block.first), *path_to(block)]
    stored = (item for part in path for item in (part.block, *snapshots_of(part)))
    size = sum(item.nbytes or item.disk_bytes for item in stored)
    return TopPrefix(tokens=length, uses=block.uses, bytes=size, pinned=block.is_pinned)
