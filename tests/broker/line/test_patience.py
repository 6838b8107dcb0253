"""How much of no use may be sent: far more than a real worker does, and far less than a flood."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.line.patience import (
    BYTES_PER_MESSAGE,
    DELTAS_MAX,
    DROPPED_MAX,
    FULL_AFTER_S,
    TURNED_AWAY_MAX,
    USELESS_MESSAGES_MAX,
    USELESS_MESSAGES_PER_S,
    Drop,
    Patience,
    cost,
)

ROWS, DELTA_BYTES, LIKELY_BYTES = 64, 80, 500


def test_a_step_that_is_of_use_costs_nothing_however_large() -> None:
    assert cost(DELTA_BYTES, 1, 1) == 0
    assert cost(ROWS * DELTA_BYTES, ROWS, ROWS) == 0
    assert cost(4096 * LIKELY_BYTES, 4096, 4096) == 0


def test_what_is_of_no_use_costs_by_its_kind_and_its_bytes() -> None:
    assert cost(50, 0, 0) == 1
    assert cost(1 + 3 * BYTES_PER_MESSAGE, 0, 0) > 3
    assert 1 < cost(ROWS * DELTA_BYTES, ROWS, 0) < 10
    assert cost(5 * 2**20, 200_000, 0) > USELESS_MESSAGES_MAX
    # One useful delta does not pay for many useless ones, nor for any number of bytes.
    assert cost(8 * 2**20, 1, 1) > 1000
    assert cost(8 * 2**20, DELTAS_MAX + 1000, 1) > 1000


def test_the_busiest_worker_whose_clients_all_go_is_not_turned_away() -> None:
    patience, now = Patience(), 0.0
    for _ in range(10_000):  # all that is queued between the two
        assert patience.spend("w", cost(ROWS * DELTA_BYTES, ROWS, 0), now)
    for _ in range(1000):
        now += 0.25
        assert patience.spend("w", cost(4096 * 200, 0, 0), now)  # a heartbeat that names 4096 rows


def test_a_flood_is_over_within_seconds_and_others_are_none_of_it() -> None:
    patience, now, sent = Patience(), 0.0, 0
    while patience.spend("flood", 1, now):
        now, sent = now + 1 / 30_000, sent + 1
    assert USELESS_MESSAGES_MAX < sent < 2 * USELESS_MESSAGES_MAX
    assert patience.is_over("flood")
    assert not patience.is_over("w")
    assert patience.spend("w", USELESS_MESSAGES_MAX, now)


def test_patience_grows_back_and_no_further_than_it_was() -> None:
    patience = Patience()
    assert patience.spend("w", USELESS_MESSAGES_MAX, 0.0)
    assert patience.spend("w", USELESS_MESSAGES_PER_S, 1.0)
    assert patience.spend("w", USELESS_MESSAGES_MAX, 1.0 + FULL_AFTER_S)
    assert not patience.spend("w", 1, 1.0 + FULL_AFTER_S)


def test_one_that_was_turned_away_is_told_on_each_connection_and_cut_when_it_goes_on() -> None:
    patience = Patience()
    assert not patience.spend("w", 2 * USELESS_MESSAGES_MAX, 0.0)
    for _ in range(2):
        done = [patience.drop("w", first=number == 0) for number in range(2 * DROPPED_MAX)]
        assert done[0] is Drop.TELL
        assert done.count(Drop.TELL) == 1
        cuts = [number for number, each in enumerate(done, 1) if each is Drop.CUT]
        assert cuts == [DROPPED_MAX, 2 * DROPPED_MAX]


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 60_000), st.floats(0, 5)), max_size=200))
@settings(deadline=None)
def test_what_is_remembered_is_bounded(spending: list[tuple[int, float, float]]) -> None:
    patience, now = Patience(), 0.0
    for peer, amount, pause_s in spending:
        now += pause_s
        if not patience.is_over(str(peer)):
            patience.spend(str(peer), amount, now)
            # Only this adds to what is remembered, and it forgets those with whom patience is whole again.
            assert all(at + FULL_AFTER_S > now for _, at in patience._left.values())
    assert len(patience._turned_away) <= TURNED_AWAY_MAX
    assert all(0 <= left <= USELESS_MESSAGES_MAX for left, _ in patience._left.values())


def test_those_turned_away_are_remembered_up_to_a_number() -> None:
    patience = Patience()
    for peer in range(TURNED_AWAY_MAX + 1):
        assert not patience.spend(str(peer), 2 * USELESS_MESSAGES_MAX, 0.0)
    assert not patience.is_over("0")
    assert patience.is_over(str(TURNED_AWAY_MAX))
