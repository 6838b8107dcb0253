"""Sleep-inhibition policy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.keep_awake import HOLD_S, KeepAwake


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.booleans()), max_size=40))
def test_it_is_kept_awake_while_requests_run_and_a_moment_longer(looks: list[tuple[float, bool]]) -> None:
    wakefulness, now, busy_at = KeepAwake(), 0.0, None
    for passed_s, busy in looks:
        now += passed_s
        busy_at = now if busy else busy_at
        assert wakefulness.is_wanted(busy, now) == (busy_at is not None and now - busy_at < HOLD_S)
