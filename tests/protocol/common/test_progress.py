"""Progress watchdog: starved requests, and requests that only wait for their turn."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from protocol.common.progress import TICK_S_MAX, ProgressWatch, Watched

BOUND_S = 30.0


class Queue:
    """Watchdog with a manual clock."""

    def __init__(self) -> None:
        self.watch = ProgressWatch(BOUND_S)
        self.now = 1000.0
        self.watch.check((), self.now, has_room=True)

    def pass_time(self, requests: Iterable[Watched], seconds: float, *, has_room: bool = True) -> list[str]:
        """Check once a second, and return the reported ids."""
        found: list[str] = []
        requests = list(requests)
        for _ in range(round(seconds)):
            self.now += 1.0
            found += self.watch.check(requests, self.now, has_room=has_room)
        return found


def waiting(number: int, state: object = 0, *, waits_for: str | None = None) -> Watched:
    return Watched(f"r{number}", (0, number), state, waits_for=waits_for)


def running(number: int, state: object = 0) -> Watched:
    return Watched(f"r{number}", (0, number), state, has_place=True)


def decoding(number: int, state: object = 0) -> Watched:
    return Watched(f"r{number}", (0, number), state, has_place=True, is_decoding=True)


def test_request_without_progress_is_reported_once_for_each_bound_and_no_other() -> None:
    queue = Queue()
    for state in range(10):
        assert queue.pass_time([running(1, state), waiting(2)], BOUND_S / 2) == []
    assert queue.pass_time([waiting(2, waits_for="gone")], BOUND_S) == []
    assert queue.pass_time([waiting(2, waits_for="gone")], 2) == ["r2"]
    assert queue.pass_time([waiting(2)], BOUND_S - 2) == []
    assert queue.pass_time([waiting(2)], 4) == ["r2"]


def test_decoding_request_without_tokens_is_reported_whatever_others_do() -> None:
    queue = Queue()
    reported: list[str] = []
    for state in range(5):
        reported += queue.pass_time([running(1, state), decoding(2), decoding(3, state)], 10, has_room=False)
    assert reported == ["r2"]


def test_full_queue_is_waited_for() -> None:
    queue = Queue()
    for state in range(10):
        line = [decoding(1, state), waiting(2), waiting(3)]
        assert queue.pass_time(line, BOUND_S / 2, has_room=False) == []
    assert queue.pass_time([waiting(2), waiting(3)], BOUND_S) == []
    assert set(queue.pass_time([waiting(2), waiting(3)], 2)) == {"r2", "r3"}


def test_request_that_is_overtaken_in_a_full_queue_is_reported() -> None:
    queue = Queue()
    assert queue.pass_time([decoding(1, 0), waiting(2)], 5, has_room=False) == []
    reported: list[str] = []
    for state in range(10):
        # The third request came later and got a place.
        line = [decoding(1, state), waiting(2), decoding(3, state)]
        reported += queue.pass_time(line, 5, has_room=False)
    assert set(reported) == {"r2"}


def test_prefix_of_a_request_that_gets_on_is_waited_for() -> None:
    queue = Queue()
    for state in range(10):
        line = [waiting(1, waits_for="r2"), running(2, state)]
        assert queue.pass_time(line, BOUND_S / 2) == []
    assert set(queue.pass_time(line, BOUND_S + 2)) == {"r2"}
    assert set(queue.pass_time(line, BOUND_S + 2)) == {"r1", "r2"}


def test_one_long_step_starves_nobody() -> None:
    queue = Queue()
    requests = [waiting(1), decoding(2)]
    assert queue.pass_time(requests, 1) == []
    for _ in range(int(BOUND_S / TICK_S_MAX) - 1):
        queue.now += 3600.0
        assert queue.watch.check(requests, queue.now, has_room=True) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from([waiting, running, decoding]), st.booleans(), st.none() | st.integers(0, 5)
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_if_nothing_gets_on_the_first_that_may_run_is_reported(
    kinds: list[tuple[type[Watched], bool, int | None]], has_room: bool
) -> None:
    """If no request makes progress, one is reported, however they wait for each other."""
    requests = []
    for number, (make, waits, other) in enumerate(kinds):
        made: Watched = make(number)  # type: ignore[call-arg, arg-type]
        if waits and not made.has_place and other is not None:
            made = waiting(number, waits_for=f"r{other}")
        requests.append(made)
    reported = Queue().pass_time(requests, 2 * BOUND_S, has_room=has_room)
    expected = {r.id for r in requests if r.has_place or has_room}
    assert set(reported) >= expected
