"""Traffic counters of requests, and records of the latest ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.flight import PHASES_MAX
from broker.dispatch.traffic import CLIENT_LEFT, ENDS_MAX, Histogram
from protocol.messages import Failed, Finished
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, failed, finished, request, reused

BOUNDS = (0.1, 1.0, 5.0)


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


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_each_bound_has_all_that_is_no_greater(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    values = [value for value, times in observed for _ in range(times)]
    assert histogram.cumulative() == [
        *(sum(value <= bound for value in values) for bound in BOUNDS),
        len(values),
    ]
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


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
