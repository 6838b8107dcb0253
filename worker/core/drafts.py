"""Drafts of one row: the n-gram proposer, and what the drafts of each source were worth so far. Pure.

Rewritten files, quoted passages and lists repeat earlier text: what followed an earlier occurrence of the
last n-gram is the draft (prompt lookup decoding, Saxena 2023). An answer that has just left a passage that it
followed is likely to come back nearby, so a match of a token or two is enough there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from worker.common_prefix import common_prefix_length
from worker.values import MEDIA_KEYS, EngineRequest, ForcedTokens

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
RETURN_TOKENS_MAX = 12
"""Distance in tokens, from the aligned position in a passage just left, within which a return is sought."""
AWAY_TOKENS = 24
"""Maximum number of tokens since the passage was left."""
INDEXED_AT_ONCE = 2048
"""Maximum tokens indexed per lookup, so that a long prompt does not delay a step."""
PAUSE_TOKENS = 16
"""Length of a pause, in tokens of the answer: a lookup takes the host 1 to 3% of a small model's step."""
_START_WEIGHT = 4.0
"""Weight of the assumed acceptance, in tried tokens."""
_FADING = 0.99
"""Decay of a tried token's weight with each further one."""


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
        places = range(max(place, there - RETURN_TOKENS_MAX) + 1, min(then, there + RETURN_TOKENS_MAX) + 1)
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


DRAFTED_MAX = 15
"""Maximum draft tokens of a row in one step: the widest pass that was measured has 16 columns."""


class DraftSource(NamedTuple):
    """Constants of a source of drafts: the `length` of a draft, the most `rows` of a step that it drafts for,
    the `acceptance` of a token that is assumed at first, and the `misses` behind which it pauses for a row:
    consecutive drafts without an accepted token, or lookups that find none."""

    length: int
    rows: int
    acceptance: float
    misses: int


SOURCES = {
    LOOKUP: DraftSource(8, 16, 0.75, 8),
    MODEL: DraftSource(4, 8, 0.8, 4),
    FORCED: DraftSource(DRAFTED_MAX, 2**31, 0.75, 4),
}
"""All measured on CPUs (`bench/notes/speculation.md`). Lookups in edited files gain 6.3 tokens a pass with 8
drafts, and 8.8 with 15, which cost twice as much; rewriting gains 1.2 to 1.3 times at 16 rows, the most that
were measured. MTP layers gain 1.5 times at 4 rows, and lose at 16. Forced tokens are limited by the price
alone. An edit of three tokens takes about six lookups until the file is found again."""

Foresee = Callable[[int], ForcedTokens]
"""`Engine.forced_tokens` of one row."""


class Average:
    """Moving average of accepted draft tokens over tried ones; at first `start`, below 1."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._accepted = self._tried = 0.0

    def expected(self, count: int) -> float:
        """Return the expected number of accepted tokens among `count`, none of which is behind a rejected
        one."""
        rate = (self._accepted + _START_WEIGHT * self._start) / (self._tried + _START_WEIGHT)
        return rate * (1 - rate**count) / (1 - rate)

    def learn(self, right: int, tried: int) -> None:
        """Record that the first `right` of `tried` tokens were accepted."""
        made = min(right + 1, tried)
        self.forget(_FADING**made)
        self._accepted += right
        self._tried += made

    def forget(self, kept: float) -> None:
        """Reduce the weight of what was learned to a share of it."""
        self._accepted, self._tried = self._accepted * kept, self._tried * kept


class RowDrafts:
    """What is known of a row: its n-gram index, up to `seen` tokens of the answer, and for each source its
    average, and its pause behind too many misses."""

    def __init__(self, request: EngineRequest, answered: Sequence[int], network: Average) -> None:
        """`network`: the draft network's average, over all rows."""
        sampling = request.sampling
        self._is_forced = bool(sampling.forced or sampling.grammar) or sampling.thinking_budget is not None
        self._seen = len(answered)
        self._lookup = NgramProposer((*request.prediction, *request.tokens, *answered))
        self._averages = {name: Average(SOURCES[name].acceptance) for name in (LOOKUP, FORCED)}
        self._averages[MODEL] = network
        self._misses = dict.fromkeys(SOURCES, 0)
        self._resumes_at = dict.fromkeys(SOURCES, 0)

    def update(self, answered: Sequence[int]) -> None:
        """Index the new tokens of the answer."""
        self._lookup.extend(answered[self._seen :])
        self._seen = len(answered)

    def is_paused(self, source: str) -> bool:
        return self._seen < self._resumes_at[source]

    def free_draft(self, room: int, rows: int, forced_tokens: Foresee) -> Draft:
        """Return the forced tokens or the n-gram draft."""
        found = NO_DRAFT
        if rows <= SOURCES[LOOKUP].rows and not self.is_paused(LOOKUP):
            found = self._lookup.propose(min(room, SOURCES[LOOKUP].length))
            if not found.tokens:
                self._count(LOOKUP, 0)
        if not self._is_forced:
            return found
        tokens, certain = forced_tokens(room)
        held = Draft(tokens, source=FORCED, certain=certain)
        if self.is_paused(FORCED):
            held = held.first(certain)
        return held if certain else max(found, held, key=self.expected)

    def expected(self, draft: Draft) -> float:
        """Return the expected number of accepted tokens."""
        return draft.certain + self._averages[draft.source].expected(len(draft.tokens) - draft.certain)

    def learn(self, draft: Draft, sampled: Sequence[int], *, is_tried: bool) -> None:
        """Compare a draft with the tokens of the step; one that was not tried, as far as they go. Certain
        tokens say nothing."""
        tokens = draft.tokens if is_tried else draft.tokens[: len(sampled)]
        right = common_prefix_length(tokens, sampled) - draft.certain
        tried = len(tokens) - draft.certain
        if right >= 0 and tried > 0:
            self._averages[draft.source].learn(right, tried)
            self._count(draft.source, right)

    def _count(self, source: str, right: int) -> None:
        self._misses[source] = 0 if right else self._misses[source] + 1
        if self._misses[source] >= SOURCES[source].misses:
            self._misses[source], self._resumes_at[source] = 0, self._seen + PAUSE_TOKENS
