"""Traffic counters of requests, records of the latest ones, and samples of the last minutes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.flight import PHASES_MAX
from broker.dispatch.history import SAMPLES_MAX
from broker.dispatch.traffic import CLIENT_LEFT, ENDS_MAX, FIRST_TOKENS_MAX, Histogram
from protocol.messages import Failed, Finished
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, failed, finished, request, reused


def answered(line: Line, id: str, *texts: str) -> None:
    """Serve a request to its end."""
    with line.dispatcher.submit(line.dispatcher.find("m"), [request(id)], ()):
        line.say("w", accepted("w", id), reused("w", id, 2, "ram"), events("w", id, *texts))
        line.say("w", finished("w", id, tokens=len(texts), cached=2))


@pytest.fixture
def line() -> Line:
    line = Line()
    line.serving("w")
    return line


def test_every_way_to_end_has_its_code(line: Line) -> None:
    ends: list[str] = []

    def end_of(id: str, *said: Finished | Failed) -> None:
        with line.dispatcher.submit(line.dispatcher.find("m"), [request(id)], ()):
            line.say("w", *said)
        ends.append(line.dispatcher.traffic.ends[-1].code)

    end_of("left")
    end_of("length", finished("w", "length", reason="length"))
    end_of("odd", finished("w", "odd", reason="my own invention"))
    end_of("broken", failed("w", "broken", "my own invention"))
    assert ends == [CLIENT_LEFT, "length", "stop", "internal_error"]
    assert [end.id for end in line.dispatcher.traffic.failures] == ["broken"]


def test_the_last_ends_are_remembered_and_no_more(line: Line) -> None:
    for number in range(ENDS_MAX + 5):
        answered(line, f"r{number}", "x")
    remembered = [end.id for end in line.dispatcher.traffic.ends]
    assert remembered == [f"r{number}" for number in range(5, ENDS_MAX + 5)]
    flight = line.dispatcher.flights.open(request("a"), "m", line.clock.now)
    for _ in range(PHASES_MAX):
        flight.enter("paused", line.clock.now)
    assert len(flight.phases) == PHASES_MAX


def test_each_bound_has_all_that_is_no_greater() -> None:
    histogram = Histogram((0.1, 1.0, 5.0))
    for value, times in ((0.1, 2), (0.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [2, 3, 3, 6]
    assert (histogram.count, histogram.sum) == (6, pytest.approx(27.7))


def test_a_request_that_flies_on_is_one_whose_phases_are_recorded_across_workers(line: Line) -> None:
    with line.dispatcher.submit(line.dispatcher.find("m"), [request("a")], ()):
        for message in (accepted("w", "a"), reused("w", "a"), events("w", "a", "x")):
            line.clock.now += 1.0
            line.say("w", message)
        line.clock.now += 1.0
        line.dispatcher.lost("w")
        line.clock.now += 2.0
        line.serving("w2")
        for message in (accepted("w2", "a~2"), reused("w2", "a~2"), events("w2", "a~2", "y")):
            line.clock.now += 1.0
            line.say("w2", message)
        line.say("w2", finished("w2", "a~2", tokens=2))
    traffic = line.dispatcher.traffic.models["m"]
    assert (traffic.first_token_s.count, traffic.first_token_s.sum) == (1, 3.0)
    assert (traffic.prompts, traffic.resumes, traffic.tokens) == (1, 1, 2)
    [end] = line.dispatcher.traffic.ends
    assert (end.code, end.resumes, end.answered) == ("stop", 1, 2)
    assert end.phases == (
        *(("queued", 0.0), ("preparing", 0.0), ("waiting", 1.0), ("prefill", 2.0), ("decode", 3.0)),
        *(("paused", 4.0), ("preparing", 6.0), ("waiting", 7.0), ("prefill", 8.0), ("decode", 9.0)),
    )


# --- the last minutes, one sample per second ------------------------------------------------------------


def pass_s(line: Line, seconds: float) -> None:
    line.clock.now += seconds
    line.dispatcher.history.tick(line.clock.now)


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=60))
def test_no_token_is_lost_or_counted_twice_however_late_one_looks(passed: list[float]) -> None:
    line = Line()
    line.serving("w")
    line.dispatcher.sweep()
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


def test_the_eldest_go_and_who_knows_some_is_told_the_others(line: Line) -> None:
    line.dispatcher.sweep()
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
