"""Answers continued by another plan: when it is allowed, and how it is reported."""

from __future__ import annotations

import pytest

from broker.dispatch.flight import Flight
from protocol.messages import Failed, Finished
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, finished, request

ISOLATE = "small, one process alone"
SET = "big, tensor over 2 processes"


@pytest.fixture
def line() -> Line:
    return Line()


def begun(line: Line) -> Flight:
    """Return a flight that got one token from a set of ranks, which then is lost."""
    line.serving("w1", identity="big", plan=SET)
    flight = line.submit(request("a"))
    line.say("w1", accepted("w1", "a"), events("w1", "a", ["x"]))
    line.dispatcher.lost("w1")
    return flight


def end_of(flight: Flight) -> Finished:
    end = flight.take()[-1]
    assert isinstance(end, Finished), end
    return end


def test_another_model_goes_on_with_an_answer_only_if_it_stands_in(line: Line) -> None:
    flight = begun(line)
    line.serving("w2", identity="small")
    assert line.attempts_sent_to("w2") == []
    assert isinstance(flight.take()[-1], Failed)
    again = begun(line := Line())
    line.serving("w2", identity="small", plan=ISOLATE, stands_in=True)
    assert line.attempts_sent_to("w2") == ["a~2"]
    line.say("w2", accepted("w2", "a~2"), finished("w2", "a~2"))
    assert end_of(again).continued_by == ISOLATE
    assert line.dispatcher.failover.continued_by == {ISOLATE: 1}


@pytest.mark.parametrize(("plan", "told"), [(SET, ""), (ISOLATE, ISOLATE), ("", "one process alone")])
def test_answer_from_two_plans_reports_continued_by(plan: str, told: str, line: Line) -> None:
    flight = begun(line)
    line.serving("w2", identity="big", plan=plan)
    line.say("w2", accepted("w2", "a~2"), finished("w2", "a~2"))
    assert end_of(flight).continued_by == told
    assert sum(line.dispatcher.failover.continued_by.values()) == bool(told)
    without_output = line.submit(request("b"))
    line.dispatcher.lost("w2")
    line.serving("w3", identity="small", plan="another", stands_in=True)
    line.say("w3", accepted("w3", "b~2"), events("w3", "b~2", ["x"]), finished("w3", "b~2"))
    assert end_of(without_output).continued_by == ""
