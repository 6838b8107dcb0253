"""What clients may hold: nothing beyond the limit, and nothing after they have gone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.http.limits import BodyBudget, Shares
from protocol.errors import Code, RequestError

KEYS = [b"a", b"b", b"c"]
MOST = 4


def at_once(held: int) -> float:
    return 1.0


def test_a_key_may_have_so_many_and_the_next_is_told_when_to_come_back() -> None:
    shares = Shares(MOST)
    with shares.held(b"a", 3, at_once):
        assert (shares.available(b"a"), shares.available(b"b")) == (1, MOST)
        with pytest.raises(RequestError) as caught, shares.held(b"a", 2, lambda held: 7.0 * held):
            raise AssertionError("let in")
        assert caught.value.code is Code.RATE_LIMIT_EXCEEDED
        assert caught.value.kind.status == 429
        assert caught.value.retry_after_s == 21.0
        assert "has 3 requests in the house, and may have 4" in caught.value.message
        with shares.held(b"a", 1, at_once), shares.held(b"b", MOST, at_once):
            assert shares.available(b"a") == shares.available(b"b") == 0
    assert len(shares) == 0


def test_more_than_a_key_may_ever_have_is_not_worth_a_retry() -> None:
    with pytest.raises(RequestError) as caught:
        Shares(MOST).allocate(b"a", MOST + 1, at_once)
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "n")
    assert caught.value.retry_after_s is None


def test_without_a_limit_or_without_a_key_nobody_is_refused() -> None:
    with Shares().held(b"a", 10**6, at_once):
        assert Shares().available(b"a") is None
    shares = Shares(1)
    with shares.held(None, 10**6, at_once):
        assert len(shares) == 0


def test_what_fails_meanwhile_gives_back_what_it_held() -> None:
    shares = Shares(1)
    with pytest.raises(ZeroDivisionError), shares.held(b"a", 1, at_once):
        raise ZeroDivisionError
    assert len(shares) == 0


def test_a_budget_is_given_out_to_the_last_byte() -> None:
    budget = BodyBudget(10)
    assert [budget.allocate(count) for count in (6, 5, 4, 0, 1)] == [True, False, True, True, False]
    assert (budget.held, budget.available) == (10, 0)
    budget.free(6)
    assert budget.allocate(6)


class House(RuleBasedStateMachine):
    """Clients come and go; a plain list of who is in is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(MOST)
        self.inside: list[tuple[bytes, int]] = []

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, MOST + 1))
    def come(self, key: bytes, count: int) -> None:
        room = MOST - sum(held for who, held in self.inside if who == key)
        try:
            self.shares.allocate(key, count, at_once)
        except RequestError as error:
            expected = Code.INVALID_REQUEST if count > MOST else Code.RATE_LIMIT_EXCEEDED
            assert (error.code, count > room) == (expected, True)  # noqa: PT017 - it may be raised or not
        else:
            assert count <= room
            self.inside.append((key, count))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            self.shares.free(*self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1))))

    @invariant()
    def what_is_held_is_what_is_inside(self) -> None:
        held: Counter[bytes] = Counter()
        for key, count in self.inside:
            held[key] += count
        assert len(self.shares) == len(held)
        for key in KEYS:
            assert self.shares.available(key) == MOST - held[key] >= 0


TestHouse = House.TestCase
