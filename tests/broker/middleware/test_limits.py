"""Concurrency per key and body budget: never beyond the limit, and released at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.middleware.limits import BodyBudget, KeyConcurrency
from protocol.common.api_keys import ApiKey
from protocol.errors import Code, RequestError
from tests.broker.dispatcher_line import refusal

MOST = 4
A, B, C = KEYS = [ApiKey.of(name, name, "here") for name in "abc"]


def at_once(held: int) -> float:
    return 1.0


def test_a_key_may_have_so_many_and_the_next_is_told_when_to_come_back() -> None:
    key_concurrency = KeyConcurrency(MOST)
    with key_concurrency.held(A, 3, at_once):
        assert (key_concurrency.available(A), key_concurrency.available(B)) == (1, MOST)
        error = refusal(key_concurrency.held(A, 2, lambda held: 7.0 * held).__enter__)
        assert (error.code, error.retry_after_s) == (Code.RATE_LIMIT_EXCEEDED, 21.0)
        assert "has 3 requests in flight; the limit is 4" in error.message
        with key_concurrency.held(A, 1, at_once), key_concurrency.held(B, MOST, at_once):
            assert key_concurrency.available(A) == key_concurrency.available(B) == 0
        error = refusal(key_concurrency.allocate, A, MOST + 1, at_once)
        assert (error.param, error.retry_after_s) == ("n", None), "no retry is worth it"
    assert len(key_concurrency) == 0


def test_without_a_limit_or_without_a_key_nobody_is_refused() -> None:
    with KeyConcurrency().held(A, 10**6, at_once):
        assert KeyConcurrency().limit(A) is None
    key_concurrency = KeyConcurrency(1)
    with key_concurrency.held(None, 10**6, at_once):
        assert len(key_concurrency) == 0


def test_key_with_a_limit_of_its_own_is_held_to_that_one() -> None:
    key_concurrency = KeyConcurrency(MOST)
    few, many = replace(A, concurrent_max=1), replace(B, concurrent_max=MOST + 1)
    with key_concurrency.held(few, 1, at_once), key_concurrency.held(many, MOST + 1, at_once):
        available = [key_concurrency.available(key) for key in (few, many, replace(B, concurrent_max=1))]
        assert available == [0, 0, 0], "the last limit has shrunk"
        assert "the limit is 1" in refusal(key_concurrency.allocate, few, 1, at_once).message
    with KeyConcurrency().held(few, 1, at_once):
        error = refusal(KeyConcurrency().allocate, few, 2, at_once)
        assert "the limit of an API key is 1" in error.message


def test_a_budget_is_given_out_to_the_last_byte() -> None:
    budget = BodyBudget(10)
    assert [budget.allocate(count) for count in (6, 5, 4, 0, 1)] == [True, False, True, True, False]
    assert (budget.held, budget.available) == (10, 0)
    budget.free(6)
    assert budget.allocate(6)


class House(RuleBasedStateMachine):
    """Stateful test: clients come and go, checked against a plain list of their requests."""

    def __init__(self) -> None:
        super().__init__()
        self.key_concurrency = KeyConcurrency(MOST)
        self.inside: list[tuple[ApiKey, int]] = []

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, MOST + 1))
    def come(self, key: ApiKey, count: int) -> None:
        room = MOST - sum(held for who, held in self.inside if who == key)
        try:
            self.key_concurrency.allocate(key, count, at_once)
        except RequestError as error:
            expected = Code.INVALID_REQUEST if count > MOST else Code.RATE_LIMIT_EXCEEDED
            assert (error.code, count > room) == (expected, True)  # noqa: PT017 - the error is optional
        else:
            assert count <= room
            self.inside.append((key, count))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            self.key_concurrency.free(*self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1))))

    @invariant()
    def what_is_held_is_what_is_inside(self) -> None:
        held: Counter[ApiKey] = Counter()
        for key, count in self.inside:
            held[key] += count
        assert len(self.key_concurrency) == len(held)
        for key in KEYS:
            assert self.key_concurrency.available(key) == MOST - held[key] >= 0


TestHouse = House.TestCase
TestHouse.settings = settings(max_examples=25, stateful_step_count=25)
