"""Acceptance estimates of a row, and lookups that become rarer where they are of no use."""

from __future__ import annotations

import itertools

import pytest

from worker.schedule.acceptance import (
    EMPTY_LOOKUPS,
    SELDOM_TOKENS,
    VAIN_TRIES,
    AcceptanceEstimate,
    DraftState,
)
from worker.schedule.ngram_proposer import LOOKUP, MODEL, Draft


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.15), (2, 0.55, 0.75), (4, 0.95, 1.0)])
def test_acceptance_of_ngram_drafts_converges_to_what_is_observed(
    right: int, low: float, high: float
) -> None:
    state = DraftState([1, 2, 3])
    before = state.acceptance(LOOKUP, 16)
    assert state.acceptance(LOOKUP, 3) < state.acceptance(LOOKUP, 8) < before < 0.5
    for _ in range(100):
        state.learn(Draft((1, 2, 3, 4), 16), right, 4)
    assert low <= state.acceptance(LOOKUP, 16) <= high
    assert (state.acceptance(LOOKUP, 3) < 0.1) is (right == 0)


def test_acceptance_of_the_network_begins_with_that_of_other_rows() -> None:
    network = AcceptanceEstimate()
    bad, new = DraftState([], network=network), DraftState([], network=network)
    before = new.acceptance(MODEL)
    for _ in range(20):
        bad.learn(Draft((1,), source=MODEL), 0, 1)
    assert bad.acceptance(MODEL) < new.acceptance(MODEL) < 0.3 < before
    assert DraftState([]).acceptance(MODEL) == before


def test_where_nothing_is_found_it_is_looked_up_less_often_until_something_is() -> None:
    state = DraftState([1, 2, 3])
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
    state = DraftState([1, 2, 3, 4, 1, 2, 3])
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
