"""Answers that another plan goes on with: who may, and who is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.dispatch.flight import Flight
from protocol.messages import Failed, Finished
from tests.broker.dispatching import Line, accepted, events, finished, ready, request

ALONE = "small, one process alone"
SET = "big, tensor over 2 processes"


@pytest.fixture
def line() -> Line:
    return Line()


def serving(
    line: Line, worker: str, *, identity: str = "big", plan: str = "", stands_in: bool = False
) -> None:
    line.hello(worker)
    told = replace(ready(worker), identity=identity, plan=plan, stands_in=stands_in)
    line.dispatcher.hear(worker, told)


def begun(line: Line) -> Flight:
    """Aboard a set, with a token, which then is gone."""
    serving(line, "w1", plan=SET)
    flight = line.board(request("a"))
    line.say("w1", accepted("w1", "a"), events("w1", "a", ["x"]))
    line.dispatcher.lost("w1")
    return flight


def end_of(flight: Flight) -> Finished:
    end = flight.take()[-1]
    assert isinstance(end, Finished), end
    return end


def test_another_model_goes_on_with_an_answer_only_if_it_stands_in(line: Line) -> None:
    flight = begun(line)
    serving(line, "w2", identity="small")
    assert line.legs_sent_to("w2") == []
    assert isinstance(flight.take()[-1], Failed)
    again = begun(line := Line())
    serving(line, "w2", identity="small", plan=ALONE, stands_in=True)
    assert line.legs_sent_to("w2") == ["a~2"]
    line.say("w2", accepted("w2", "a~2"), finished("w2", "a~2"))
    assert end_of(again).continued_by == ALONE
    assert line.dispatcher.failover.continued_by == {ALONE: 1}


@pytest.mark.parametrize(("plan", "told"), [(SET, ""), (ALONE, ALONE), ("", "one process alone")])
def test_who_has_an_answer_from_two_plans_is_told(plan: str, told: str, line: Line) -> None:
    flight = begun(line)
    serving(line, "w2", plan=plan)
    line.say("w2", accepted("w2", "a~2"), finished("w2", "a~2"))
    assert end_of(flight).continued_by == told
    assert sum(line.dispatcher.failover.continued_by.values()) == bool(told)


def test_who_had_nothing_yet_has_all_of_it_from_one_plan(line: Line) -> None:
    serving(line, "w1", plan=SET)
    flight = line.board(request("a"))
    line.dispatcher.lost("w1")
    serving(line, "w2", identity="small", plan=ALONE, stands_in=True)
    line.say("w2", accepted("w2", "a~2"), events("w2", "a~2", ["x"]), finished("w2", "a~2"))
    assert end_of(flight).continued_by == ""
