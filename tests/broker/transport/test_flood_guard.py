"""Flood guard: the limit on useless messages is far above a real worker's rate and far below a flood."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.transport.flood_guard import (
    BYTES_PER_MESSAGE,
    DELTAS_MAX,
    DROPPED_MAX,
    FULL_AFTER_S,
    TURNED_AWAY_MAX,
    USELESS_MESSAGES_MAX,
    USELESS_MESSAGES_PER_S,
    DropAction,
    FloodGuard,
    cost,
)

ROWS, DELTA_BYTES, LIKELY_BYTES = 64, 80, 500


def test_useless_messages_cost_by_count_and_bytes() -> None:
    assert cost(DELTA_BYTES, 1, 1) == cost(4096 * LIKELY_BYTES, 4096, 4096) == 0
    assert cost(50, 0, 0) == 1
    assert cost(1 + 3 * BYTES_PER_MESSAGE, 0, 0) > 3
    assert 1 < cost(ROWS * DELTA_BYTES, ROWS, 0) < 10
    assert cost(5 * 2**20, 200_000, 0) > USELESS_MESSAGES_MAX
    # One useful delta does not offset many useless ones, nor arbitrarily many bytes.
    assert cost(8 * 2**20, 1, 1) > 1000
    assert cost(8 * 2**20, DELTAS_MAX + 1000, 1) > 1000


def test_the_busiest_worker_whose_clients_all_go_is_not_turned_away() -> None:
    patience, now = FloodGuard(), 0.0
    for _ in range(10_000):  # all messages queued between the two
        assert patience.charge("w", cost(ROWS * DELTA_BYTES, ROWS, 0), now)
    for _ in range(1000):
        now += 0.25
        assert patience.charge("w", cost(4096 * 200, 0, 0), now)  # heartbeat with 4096 rows


def test_a_flood_is_over_within_seconds_and_others_are_none_of_it() -> None:
    patience, now, sent = FloodGuard(), 0.0, 0
    while patience.charge("flood", 1, now):
        now, sent = now + 1 / 30_000, sent + 1
    assert USELESS_MESSAGES_MAX < sent < 2 * USELESS_MESSAGES_MAX
    assert patience.is_turned_away("flood")
    assert not patience.is_turned_away("w")
    assert patience.charge("w", USELESS_MESSAGES_MAX, now)


def test_patience_grows_back_and_no_further_than_it_was() -> None:
    patience = FloodGuard()
    assert patience.charge("w", USELESS_MESSAGES_MAX, 0.0)
    assert patience.charge("w", USELESS_MESSAGES_PER_S, 1.0)
    assert patience.charge("w", USELESS_MESSAGES_MAX, 1.0 + FULL_AFTER_S)
    assert not patience.charge("w", 1, 1.0 + FULL_AFTER_S)


def test_refused_peer_is_notified_once_per_connection_and_cut_if_it_continues() -> None:
    patience = FloodGuard()
    assert not patience.charge("w", 2 * USELESS_MESSAGES_MAX, 0.0)
    for _ in range(2):
        done = [patience.drop("w", first=number == 0) for number in range(2 * DROPPED_MAX)]
        assert done[0] is DropAction.TELL
        assert done.count(DropAction.TELL) == 1
        cuts = [number for number, each in enumerate(done, 1) if each is DropAction.CUT]
        assert cuts == [DROPPED_MAX, 2 * DROPPED_MAX]


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 60_000), st.floats(0, 5)), max_size=200))
@settings(max_examples=20)
def test_flood_guard_state_is_bounded(spending: list[tuple[int, float, float]]) -> None:
    patience, now = FloodGuard(), 0.0
    for peer, amount, pause_s in spending:
        now += pause_s
        if not patience.is_turned_away(str(peer)):
            patience.charge(str(peer), amount, now)
            # Only `charge` adds entries, and it removes those of peers with a full budget.
            assert all(at + FULL_AFTER_S > now for _, at in patience._left.values())
    for peer in range(TURNED_AWAY_MAX + 1):
        assert not patience.charge(f"refused {peer}", 2 * USELESS_MESSAGES_MAX, now)
    assert not patience.is_turned_away("refused 0")
    assert patience.is_turned_away(f"refused {TURNED_AWAY_MAX}")
    assert len(patience._turned_away) <= TURNED_AWAY_MAX
    assert all(0 <= left <= USELESS_MESSAGES_MAX for left, _ in patience._left.values())
