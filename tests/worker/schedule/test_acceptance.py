"""Acceptance estimates of a row, and lookups that become rarer where they are of no use."""

from __future__ import annotations

import itertools

from worker.schedule.acceptance import (
    EMPTY_LOOKUPS,
    SELDOM_TOKENS,
    VAIN_TRIES,
    AcceptanceEstimate,
    AcceptanceRate,
    DraftState,
)
from worker.schedule.ngram_proposer import NgramProposer


def test_odds_begin_as_usual_and_become_what_is_seen() -> None:
    acceptance = AcceptanceEstimate()
    assert acceptance.of(3) < acceptance.of(8) < acceptance.of(16)
    for _ in range(100):
        acceptance.learn(16, right=0, tried=4)
        acceptance.learn(3, right=4, tried=4)
    assert acceptance.of(16) < 0.15
    assert acceptance.of(3) > 0.9


def test_where_nothing_is_found_it_is_looked_up_less_often_until_something_is() -> None:
    state = DraftState(NgramProposer([1, 2, 3]), AcceptanceRate())
    said = itertools.count(1)

    def looked(tokens: int) -> int:
        due = [token for token in itertools.islice(said, tokens) if state.is_due(token)]
        for state.seen in due:
            state.lookup.extend([4 + state.seen])
            assert not state.look_up(1).tokens
        return len(due)

    assert looked(EMPTY_LOOKUPS) == EMPTY_LOOKUPS
    assert looked(10 * SELDOM_TOKENS) == 10
    state.lookup.extend([1, 2, 3])
    state.seen = 8 * EMPTY_LOOKUPS
    assert state.look_up(1).tokens == (5,)
    assert looked(EMPTY_LOOKUPS) == EMPTY_LOOKUPS


def test_failing_ngram_lookups_are_throttled_until_one_is_accepted() -> None:
    state = DraftState(NgramProposer([1, 2, 3, 4, 1, 2, 3]), AcceptanceRate())
    draft = state.look_up(1)
    assert draft.tokens == (4,)

    def places() -> list[int]:
        found = []
        for state.seen in range(2 * SELDOM_TOKENS):
            found += [state.seen] if state.look_up(1).tokens else []
        return found

    for _ in range(VAIN_TRIES):
        assert len(places()) == 2 * SELDOM_TOKENS
        state.learn(draft, 0, 1)
    assert places() == [0, SELDOM_TOKENS]
    state.learn(draft, 1, 1)
    assert len(places()) == 2 * SELDOM_TOKENS
