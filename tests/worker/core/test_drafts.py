"""N-gram proposer: drafts are what followed the longest match, and never an image."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.core import drafts
from worker.core.drafts import (
    AWAY_TOKENS,
    ENDING_TOKENS,
    MATCH_TOKENS_MAX,
    PLACES_MAX,
    RETURN_TOKENS_MAX,
    SURE_TOKENS,
    Draft,
    NgramProposer,
)
from worker.values import MEDIA_KEYS

FILE = tuple(range(100, 200))

tokens_drawn = st.lists(st.integers(0, 2), max_size=60)


def matched(tokens: list[int], place: int) -> int:
    """Return how many tokens before `place` match those before the end."""
    count = 0
    while count < min(place, MATCH_TOKENS_MAX) and tokens[place - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


def test_image_keys_are_never_proposed() -> None:
    assert NgramProposer([1, 2, 3, 4, MEDIA_KEYS + 5, 1, 2, 3]).propose(4) == Draft((4,), 3)


def rewriting(*said: int) -> NgramProposer:
    """Return a row that repeats the file for a while and then continues with `said`."""
    row = NgramProposer((*FILE, *FILE[:SURE_TOKENS]))
    assert row.propose(1) == Draft(FILE[SURE_TOKENS : SURE_TOKENS + 1], SURE_TOKENS)
    for token in said:
        row.extend([token])
    return row


def test_a_token_is_enough_to_come_back_near_to_where_one_was_put_in_for_another() -> None:
    assert rewriting(0).propose(2) == Draft()
    back = FILE.index(FILE[SURE_TOKENS + 1])
    assert rewriting(0, FILE[back]).propose(2) == Draft(FILE[back + 1 : back + 3], 1)
    assert rewriting(0, 1, 2, FILE[back]).propose(1).matched == 1, "more tokens were inserted than replaced"
    assert rewriting(FILE[back + 3], FILE[back + 4]).propose(1) == Draft(FILE[back + 5 : back + 6], 2)


def test_a_token_from_afar_tells_nothing() -> None:
    assert rewriting(0, FILE[SURE_TOKENS + 1 + RETURN_TOKENS_MAX]).propose(1).matched == 1
    assert rewriting(0, FILE[SURE_TOKENS + 2 + RETURN_TOKENS_MAX]).propose(1) == Draft()
    assert rewriting(0, FILE[SURE_TOKENS - 1]).propose(1) == Draft(), "that part has been repeated"
    away = [0] * AWAY_TOKENS
    assert rewriting(*away, FILE[SURE_TOKENS + AWAY_TOKENS]).propose(1) == Draft()


@given(tokens_drawn, tokens_drawn, st.integers(1, 5))
def test_proposal_is_what_follows_a_longest_match(first: list[int], more: list[int], wanted: int) -> None:
    row = NgramProposer(first)
    row.propose(wanted)
    row.extend(more)
    tokens = [*first, *more]
    found = row.propose(wanted)
    ending = tokens[len(tokens) - ENDING_TOKENS :]
    places = [
        end for end in range(ENDING_TOKENS, len(tokens)) if tokens[end - ENDING_TOKENS : end] == ending
    ][-PLACES_MAX:]
    best = max((matched(tokens, place) for place in places), default=0)
    if found.matched != best:  # it has just left the text that it was following
        assert found.matched >= max(best, 1)
        near = [place for place in range(1, len(tokens)) if matched(tokens, place) == found.matched]
        assert found.tokens in [tuple(tokens[place : place + wanted]) for place in near]
        return
    followed = [tuple(tokens[place : place + wanted]) for place in places if matched(tokens, place) == best]
    assert found.tokens == (followed[-1] if followed else ())


def test_a_long_prompt_is_indexed_bit_by_bit_up_to_its_end() -> None:
    steps = 3
    row = NgramProposer([*range(drafts.INDEXED_AT_ONCE * steps), 0, 1, 2])
    assert [row.propose(1) for _ in range(steps)][-1] == Draft((3,), 3)
