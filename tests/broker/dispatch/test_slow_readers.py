"""Streams whose clients do not read, and which end when other requests need their rows."""

from __future__ import annotations

import pytest

from broker.dispatch.flight import Flight
from broker.dispatch.starvation import UNREAD_S_MAX, WAIT_S_MIN, displaced
from protocol.errors import Code
from protocol.messages import Failed
from tests.broker.dispatcher_line import Line, cancel
from tests.factories import accepted, events, request, reused


@pytest.fixture
def line() -> Line:
    line = Line()
    line.serving("w", rows=8)
    return line


def begun(line: Line, id: str) -> Flight:
    flight = waiting(line, id)
    line.say("w", reused("w", id), events("w", id, "x"))
    return flight


def waiting(line: Line, id: str) -> Flight:
    flight = line.submit(request(id))
    line.say("w", accepted("w", id))
    return flight


def displaced_by(line: Line) -> list[str]:
    return [flight.id for flight in displaced(line.dispatcher.flights.assigned("w"), line.clock.now)]


def test_longest_unread_streams_are_displaced_one_for_each_that_waits(line: Line) -> None:
    now = line.clock.now
    for id, unread_since in {"a": now + 1.0, "b": now, "c": None, "d": now + 2.0}.items():
        begun(line, id).unread_since = unread_since
    line.clock.now += 2.0 + UNREAD_S_MAX
    line.submit(request("being prepared"))  # which waits for no row
    line.clock.now += 9.0
    assert displaced_by(line) == []
    for count, id in enumerate("wxyz", 1):
        waiting(line, id)
        line.clock.now += WAIT_S_MIN
        assert displaced_by(line) == ["b", "a", "d"][:count]


@pytest.mark.parametrize(("unread_s", "wait_s"), [(UNREAD_S_MAX - 0.01, 9.0), (9.0, WAIT_S_MIN - 0.01)])
def test_short_waits_displace_nobody(unread_s: float, wait_s: float, line: Line) -> None:
    stream = begun(line, "a")
    waiting(line, "b")
    line.clock.now += wait_s
    stream.unread_since = line.clock.now - unread_s
    assert displaced_by(line) == []


def test_displaced_stream_is_cancelled_at_its_worker_and_fails(line: Line) -> None:
    stream = begun(line, "a")
    waiting(line, "b")
    stream.unread_since = line.clock.now
    line.clock.now += UNREAD_S_MAX
    line.beat("w")
    line.sent_to("w")
    line.dispatcher.sweep()
    assert line.sent_to("w") == [cancel("a")]
    assert isinstance(stream.terminal, Failed)
    assert stream.terminal.code == Code.CLIENT_TOO_SLOW
    assert "0.5 s while other requests waited" in stream.terminal.message
