"""History of the last minutes: one sample per second, however often `tick` is called."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.history import SAMPLES_MAX
from broker.dispatch.traffic import FIRST_TOKENS_MAX
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, request


def serving() -> Line:
    line = Line()
    line.serving("w")
    line.dispatcher.sweep()
    return line


def pass_s(line: Line, seconds: float) -> None:
    line.clock.now += seconds
    line.dispatcher.history.tick(line.clock.now)


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=60))
def test_no_token_is_lost_or_counted_twice_however_late_one_looks(passed: list[float]) -> None:
    line = serving()
    history = line.dispatcher.history
    with line.dispatcher.submit(line.dispatcher.find("m"), [request("a")], ()):
        line.say("w", accepted("w", "a"))
        for number, seconds in enumerate(passed):
            line.say("w", events("w", "a", "x", first=number))
            pass_s(line, seconds)
    pass_s(line, 1.0)
    times = [1000.0, *(sample.at for sample in history.samples)]
    lengths = [after - before for before, after in itertools.pairwise(times)]
    assert all(length >= 1.0 - 1e-9 for length in lengths)
    told = sum(s.tokens_per_s * length for s, length in zip(history.samples, lengths, strict=True))
    assert abs(told - len(passed)) < 0.01 * sum(lengths)


def test_the_eldest_go_and_who_knows_some_is_told_the_others() -> None:
    line = serving()
    history = line.dispatcher.history
    for number in range(FIRST_TOKENS_MAX + 1):
        with line.dispatcher.submit(line.dispatcher.find("m"), [request(f"r{number}")], ()):
            line.say("w", accepted("w", f"r{number}"), events("w", f"r{number}", "x"))
    assert len(line.dispatcher.traffic.first_tokens) == FIRST_TOKENS_MAX
    line.submit(request("a"))
    line.dispatcher.lost("w")
    pass_s(line, 1.0)
    assert history.samples[-1].waiting == 1, "a request that no worker has waits too"
    for _ in range(SAMPLES_MAX + 9):
        pass_s(line, 1.0)
    assert len(history.samples) == SAMPLES_MAX
    assert history.taken == SAMPLES_MAX + 10
    assert history.samples[-1].first_token_p50_s is None, "none in the last minute"
    assert history.since(0) == list(history.samples)
    assert history.since(history.taken - 2) == list(history.samples)[-2:]
    assert history.since(history.taken) == []
