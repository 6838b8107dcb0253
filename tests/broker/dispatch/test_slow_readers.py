"""Streams whose clients do not read, and which end when other requests need their rows."""

from __future__ import annotations

import pytest

from broker.dispatch.flight import Flight
from broker.dispatch.slow_readers import UNREAD_S_MAX, WAIT_S_MIN, displaced
from protocol.errors import Code
from protocol.messages import Cancel, Failed
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, request, reused


class Crowd:
    """One worker, whose running and waiting requests are opened by the test."""

    def __init__(self) -> None:
        self.line = Line()
        self.line.serving("w", rows=8)

    def open(self, id: str, *, begun: bool) -> Flight:
        flight = self.line.submit(request(id))
        self.line.say("w", accepted("w", id))
        if begun:
            self.line.say("w", reused("w", id), events("w", id, "x"))
        return flight

    def displaced(self) -> list[str]:
        assigned = self.line.dispatcher.flights.assigned("w")
        return [flight.id for flight in displaced(assigned, self.line.clock.now)]


def test_longest_unread_streams_are_displaced_one_for_each_that_waits() -> None:
    crowd = Crowd()
    now = crowd.line.clock.now
    for id, unread_since in {"a": now + 1.0, "b": now, "c": None, "d": now + 2.0}.items():
        crowd.open(id, begun=True).unread_since = unread_since
    crowd.line.clock.now += 2.0 + UNREAD_S_MAX
    assert crowd.displaced() == []
    for count, id in enumerate("wxyz", 1):
        crowd.open(id, begun=False)
        crowd.line.clock.now += WAIT_S_MIN
        assert crowd.displaced() == ["b", "a", "d"][:count]


@pytest.mark.parametrize(("unread_s", "wait_s"), [(UNREAD_S_MAX - 0.01, 9.0), (9.0, WAIT_S_MIN - 0.01)])
def test_short_waits_displace_nobody(unread_s: float, wait_s: float) -> None:
    crowd = Crowd()
    stream = crowd.open("a", begun=True)
    crowd.open("b", begun=False)
    crowd.line.clock.now += wait_s
    stream.unread_since = crowd.line.clock.now - unread_s
    assert crowd.displaced() == []


def test_request_that_is_being_prepared_waits_for_no_row() -> None:
    crowd = Crowd()
    crowd.open("a", begun=True).unread_since = crowd.line.clock.now
    crowd.line.submit(request("b"))
    crowd.line.clock.now += 9.0
    assert crowd.displaced() == []


def test_displaced_stream_is_cancelled_at_its_worker_and_fails() -> None:
    crowd = Crowd()
    stream = crowd.open("a", begun=True)
    crowd.open("b", begun=False)
    stream.unread_since = crowd.line.clock.now
    crowd.line.clock.now += UNREAD_S_MAX
    crowd.line.beat("w")
    crowd.line.sent_to("w")
    crowd.line.dispatcher.sweep()
    assert [m.id for m in crowd.line.sent_to("w") if isinstance(m, Cancel)] == ["a"]
    assert isinstance(stream.terminal, Failed)
    assert stream.terminal.code == Code.CLIENT_TOO_SLOW
    assert "0.5 s while other requests waited" in stream.terminal.message
