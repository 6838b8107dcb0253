"""What may follow in an answer, looked up in what its prompt and itself have said before.

Rewritten files, quoted passages and lists repeat what was there: where the last tokens stood before, what
followed then is the draft (prompt lookup decoding, Saxena 2023). Where an answer that went along with what
stood before has just left it, it is likely to come back near by, and a token or two are enough to tell. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.pictures import MEDIA_KEYS

ENDING_TOKENS = 3
"""The shortest ending that is looked up: two tokens are right one time in three."""
MATCH_TOKENS_MAX = 16
"""A longer match says no more."""
LOOKUP = "lookup"
PLACES_MAX = 4
"""Of an ending, so many of its last places are remembered."""
SURE_TOKENS = 8
"""Whoever has said so many tokens as they stood before goes along with what stood there."""
NEAR_TOKENS = 12
"""By so many more tokens or fewer it may come back to that than if one was put in for each taken out."""
AWAY_TOKENS = 24
"""While it has said no more others."""
INDEXED_AT_ONCE = 2048
"""A long prompt is indexed bit by bit: nobody waits for it."""


class Draft(NamedTuple):
    """What may follow. `matched`: how many tokens before it were the same, where that says so.
    `source`: what says so. `certain`: its first tokens that stand whatever is drawn."""

    tokens: tuple[int, ...] = ()
    matched: int = 0
    source: str = LOOKUP
    certain: int = 0

    def first(self, count: int) -> Draft:
        """No more than so many tokens of it."""
        return self._replace(tokens=self.tokens[:count], certain=min(count, self.certain))


NO_DRAFT = Draft()


class Lookup:
    """One row's tokens, by their endings."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[tuple[int, ...], int] = {}
        """Behind each ending: where it ended last."""
        self._before = [0] * ENDING_TOKENS
        """Of each such place: where its ending ended before; 0: nowhere. So far it is indexed."""
        self._left = (0, 0)
        """Where the last long match stood, and where the row did then."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The row has said more."""
        self._tokens += tokens

    def propose(self, wanted: int) -> Draft:
        """At most so many tokens that followed the longest match, of equals the latest."""
        self._index()
        place, matched = self._longest()
        if matched >= SURE_TOKENS:
            self._left = (place, len(self._tokens))
        elif (near := self._near())[1] >= max(matched, 1):
            place, matched = near
        return Draft(tuple(_known(self._tokens[place : place + wanted])), matched) if matched else NO_DRAFT

    def _longest(self) -> tuple[int, int]:
        """Behind the longest match of the row's ending, and how long that is."""
        tokens, end = self._tokens, len(self._tokens)
        place = self._places.get(tuple(tokens[end - ENDING_TOKENS :]), 0)
        best, longest = 0, 0
        for _ in range(PLACES_MAX):
            if not place:
                break
            matched = self._matched(place, end)
            if matched > longest:
                best, longest = place, matched
            place = self._before[place]
        return best, longest

    def _near(self) -> tuple[int, int]:
        """The same of places near to where the row would be, had it not left what it went along with."""
        (place, then), end = self._left, len(self._tokens)
        if not place or not 0 < end - then <= AWAY_TOKENS:
            return 0, 0
        there = place + end - then
        places = range(max(place, there - NEAR_TOKENS) + 1, min(then, there + NEAR_TOKENS) + 1)
        found = ((self._matched(place, end), -abs(place - there), place) for place in places)
        matched, _, best = max(found, default=(0, 0, 0))
        return best, matched

    def _index(self) -> None:
        tokens, places, before = self._tokens, self._places, self._before
        first = len(before)
        # Not the end itself: what is looked up is what follows it.
        until = min(len(tokens), first + INDEXED_AT_ONCE)
        for end in range(first, until):
            ending = tuple(tokens[end - ENDING_TOKENS : end])
            before.append(places.get(ending, 0))
            places[ending] = end

    def _matched(self, place: int, end: int) -> int:
        """How many tokens before both are the same."""
        matched = 0
        while matched < min(place, MATCH_TOKENS_MAX):
            if self._tokens[place - 1 - matched] != self._tokens[end - 1 - matched]:
                break
            matched += 1
        return matched


def _known(tokens: Sequence[int]) -> Sequence[int]:
    """Up to where an image stands: nobody says one."""
    for index, token in enumerate(tokens):
        if token >= MEDIA_KEYS:
            return tokens[:index]
    return tokens
