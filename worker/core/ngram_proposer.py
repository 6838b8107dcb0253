"""N-gram proposer: drafts from earlier occurrences in a row's prompt and answer. Pure.

Rewritten files, quoted passages and lists repeat earlier text: what followed an earlier occurrence of the
last n-gram is the draft (prompt lookup decoding, Saxena 2023). An answer that has just left a passage that it
followed is likely to come back nearby, so a match of a token or two is enough there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.values import MEDIA_KEYS

LOOKUP, FORCED, MODEL = "lookup", "forced", "model"
"""Sources of drafts: the n-gram proposer, a constraint, the draft network."""
ENDING_TOKENS = 3
"""Length of the n-gram that is looked up: of two tokens, one draft in three would be right."""
MATCH_TOKENS_MAX = 16
"""Longest match that is measured: longer ones predict no better."""
PLACES_MAX = 4
"""Number of an n-gram's latest occurrences that are compared."""
SURE_TOKENS = 8
"""Match length from which on the answer is taken to follow an earlier passage."""
CAUGHT_UP_TOKENS_MAX = 12
"""Distance in tokens, from the aligned position in a passage just left, within which a return is sought."""
AWAY_TOKENS = 24
"""Maximum number of tokens since the passage was left."""
INDEXED_AT_ONCE = 2048
"""Maximum tokens indexed per lookup, so that a long prompt does not delay a step."""


class Draft(NamedTuple):
    """A draft. `matched`: the match length of an n-gram draft. `source`: the proposer. `certain`: the number
    of its first tokens that are forced."""

    tokens: tuple[int, ...] = ()
    matched: int = 0
    source: str = LOOKUP
    certain: int = 0

    def first(self, count: int) -> Draft:
        """Return the draft cut to at most `count` tokens."""
        return self._replace(tokens=self.tokens[:count], certain=min(count, self.certain))


NO_DRAFT = Draft()


class NgramProposer:
    """N-gram index over one row's tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[tuple[int, ...], int] = {}
        """The end of each n-gram's latest occurrence."""
        self._before = [0] * ENDING_TOKENS
        """For each position, the end of its n-gram's previous occurrence; 0: none. As long as the index."""
        self._left = (0, 0)
        """The position of the last long match, and the row's length then."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer."""
        self._tokens += tokens

    def propose(self, wanted: int) -> Draft:
        """Return at most `wanted` tokens that followed the longest match, the latest among equals."""
        self._index()
        place, matched = self._longest()
        if matched >= SURE_TOKENS:
            self._left = (place, len(self._tokens))
        elif (near := self._near())[1] >= max(matched, 1):
            place, matched = near
        return Draft(tuple(_known(self._tokens[place : place + wanted])), matched) if matched else NO_DRAFT

    def _longest(self) -> tuple[int, int]:
        """Return the position after the longest match of the row's end, and the match's length."""
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
        """Return the same near the position where the row would be if it had not left the passage."""
        (place, then), end = self._left, len(self._tokens)
        if not place or not 0 < end - then <= AWAY_TOKENS:
            return 0, 0
        there = place + end - then
        places = range(
            max(place, there - CAUGHT_UP_TOKENS_MAX) + 1, min(then, there + CAUGHT_UP_TOKENS_MAX) + 1
        )
        found = ((self._matched(place, end), -abs(place - there), place) for place in places)
        matched, _, best = max(found, default=(0, 0, 0))
        return best, matched

    def _index(self) -> None:
        tokens, places, before = self._tokens, self._places, self._before
        first = len(before)
        # The end itself is left out: nothing follows it yet.
        until = min(len(tokens), first + INDEXED_AT_ONCE)
        for end in range(first, until):
            ending = tuple(tokens[end - ENDING_TOKENS : end])
            before.append(places.get(ending, 0))
            places[ending] = end

    def _matched(self, place: int, end: int) -> int:
        """Return how many tokens before both positions are equal."""
        matched = 0
        while matched < min(place, MATCH_TOKENS_MAX):
            if self._tokens[place - 1 - matched] != self._tokens[end - 1 - matched]:
                break
            matched += 1
        return matched


def _known(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens before the first image placeholder, which cannot be generated."""
    for index, token in enumerate(tokens):
        if token >= MEDIA_KEYS:
            return tokens[:index]
    return tokens
