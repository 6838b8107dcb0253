"""Which prompt need not be computed, because it begins like one that was, or like one that now is. Pure.

A row is looked up when its turn to be prefilled has come, not before: what others store until then counts.
One that begins like another that is further along waits for that one to get there, if this spares enough.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from worker.prefixes.index import Match, PrefixIndex
from worker.schedule.rows import Row

SHORT_TOKENS_MAX = 256
"""A prompt with no more than this to prefill may be run together with others."""
LONG_TOKENS = 8192
"""A long prefill is stored whenever it has got on so far, where that takes a state."""
REUSED_TOKENS_MIN = 16
"""Less than that is not restored: short prompts rather run together."""
AWAITED_TOKENS_MIN = 128
"""To spare less than that no row waits."""
CUT_NEAR = 32
"""A cut serves rows that share so few tokens more than are before it."""
CUTS_MAX = 16
"""At most so many positions of a row are stored for others."""

SCORED, SPARSE = "scored", "sparse"
"""Why nothing is reused of a prompt whose tokens' likelihoods are asked: they are computed with it; and of
one of which parts are left out."""


class _Seen(NamedTuple):
    version: int
    match: Match


class Sharing:
    """What `index` knows of the rows of a scheduler."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._seen: dict[str, _Seen] = {}
        self._common: dict[tuple[str, str], int] = {}

    def begin(self, row: Row) -> None:
        """A row has come. A short text is run in one go; what it shares is no loss. Behind its last image
        another question may follow next time."""
        if row.sparse:
            return
        if self._index.shape.has_states and (row.pictures or len(row.tokens) > SHORT_TOKENS_MAX):
            behind = (picture.end for picture in row.pictures[-1:])
            regular = range(LONG_TOKENS, len(row.tokens), LONG_TOKENS)
            row.cuts = sorted({*row.request.boundaries, *behind, *regular})

    def end(self, row: Row) -> None:
        """A row has left."""
        self._seen.pop(row.id, None)
        for pair in [pair for pair in self._common if row.id in pair]:
            del self._common[pair]

    def miss(self, row: Row) -> str:
        """Why it was not more."""
        if not row.is_scored or row.sparse:
            return SPARSE if row.sparse else SCORED
        match = self._look_up(row)
        return match.miss if _is_worth_it(row, match) or not match.length else "short"

    def ready(self, heads: Iterable[Row], begun: Iterable[Row]) -> dict[Row, Match | None]:
        """Those of `heads` that need not wait for another row, each with the stored prefix it begins with.

        A row that has begun waits for none, and one that has not only for those before it and those that
        have `begun`: so they never wait in a circle.
        """
        ahead = list(begun)
        ready: dict[Row, Match | None] = {}
        for row in heads:
            if row.prefilled or row.sparse:
                ready[row] = None
            elif not self._awaits(row, ahead):
                ready[row] = self._find(row)
            ahead.append(row)
        return ready

    def _find(self, row: Row) -> Match | None:
        """The stored prefix that a row without caches can begin with. None: none that is worth it."""
        match = self._look_up(row)
        return match if _is_worth_it(row, match) else None

    def _awaits(self, row: Row, others: Iterable[Row]) -> bool:
        """Whether one of `others`, which run before it, will soon have stored much more of it than there is.

        Where that needs a state of the other one, it is told to store it there.
        """
        if len(row.tokens) <= AWAITED_TOKENS_MIN:
            return False
        there = self._look_up(row).length
        for other in others:
            if other is row or other.family == row.family or other.request.salt != row.request.salt:
                continue
            if other.sparse:
                continue  # it stores nothing
            until = min(self._shared(row, other), row.reusable)
            if until - there >= AWAITED_TOKENS_MIN and self._promises(other, until):
                return True
        return False

    def _promises(self, other: Row, until: int) -> bool:
        """Whether what is shared with it up to `until`, or almost, will be stored as others need it."""
        if not self._index.shape.has_states:
            return other.kept < until
        if any(other.prefilled < cut <= until < cut + CUT_NEAR for cut in other.cuts):
            return True
        if other.prefilled >= until or len(other.cuts) >= CUTS_MAX:
            return False
        bisect.insort(other.cuts, until)
        return True

    def _look_up(self, row: Row) -> Match:
        seen = self._seen.get(row.id)
        if seen is None or seen.version != self._index.version:
            match = self._index.find(row.tokens, salt=row.request.salt, limit=row.reusable, ram_only=True)
            seen = self._seen[row.id] = _Seen(self._index.version, match)
        return seen.match

    def _shared(self, row: Row, other: Row) -> int:
        pair = (row.id, other.id)
        if pair not in self._common:
            self._common[pair] = _common_length(row.tokens, other.tokens)
        return self._common[pair]


def _is_worth_it(row: Row, match: Match) -> bool:
    """Prompts with images run by themselves, however short; to have one behind them spares a look too."""
    reaches_image = bool(row.pictures) and match.length >= row.pictures[0].end
    return match.length >= REUSED_TOKENS_MIN or reaches_image


def _common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
