"""Starvation: a flight without progress on a working worker is resent, by the gateway's clock."""

from __future__ import annotations

from broker.dispatch.failover import WAIT_S_MAX
from broker.dispatch.fleet import HealthState
from protocol.errors import Code
from protocol.messages import Draining, Failed
from protocol.types import RequestStatus
from tests.broker.dispatcher_line import STALL_S, Line, cancel, code_of
from tests.factories import accepted, events, request


class Worked(Line):
    """Dispatcher with one worker, which sends heartbeats and serves one chosen request."""

    def __init__(self, *requests: str, rows: int = 4) -> None:
        """`requests`: those that it has accepted."""
        super().__init__(waiting_max=99)
        self.answered = 0
        self.serving("w", rows=rows)
        self.flights = [self.submit(request(id)) for id in requests]
        for id in requests:
            self.say("w", accepted("w", id))
            self.clock.now += 0.1

    def pass_time(
        self, seconds: float, *rows: RequestStatus, served: str | None = None, preparing: int = 0
    ) -> None:
        """Advance time. Each second the worker sends a heartbeat, and the `served` request gets a token."""
        told = [*rows, *([RequestStatus(id=served, phase="decode", prompt_tokens=3)] if served else [])]
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            self.steps += 1
            if served:
                self.say("w", events("w", served, "x", first=self.answered))
                self.answered += 1
            running = sum(row.phase != "waiting" for row in told)
            self.beat("w", running=running, steps=self.steps, rows=told, waiting=len(rows) + preparing)
            self.dispatcher.sweep()

    @property
    def starved(self) -> int:
        return self.dispatcher.failover.counts["starved"]


def waiting(id: str) -> RequestStatus:
    return RequestStatus(id=id, phase="waiting", prompt_tokens=3)


def test_worker_that_starves_a_flight_twice_is_taken_out_and_ended() -> None:
    line = Worked("lost")
    [flight] = line.flights
    line.pass_time(STALL_S + 3, waiting("lost"))
    assert (flight.attempts, line.starved) == (2, 1)
    assert cancel("lost") in line.sent_to("w")
    line.say("w", accepted("w", "lost~2"))
    line.pass_time(STALL_S + 3, waiting("lost~2"))
    worker = line.dispatcher.fleet.get("w")
    assert worker is not None
    assert worker.verdict is HealthState.STARVING
    assert line.killed[0] == ("w", 1)
    assert (flight.attempt, flight.is_suspect) == (None, False)
    line.dispatcher.lost("w")
    line.serving("next")
    assert line.attempts_sent_to("next") == ["lost~3"]


def test_flight_that_is_never_prepared_fails_and_its_worker_stays() -> None:
    line = Worked()
    flight = line.submit(request("huge"))
    line.pass_time(STALL_S + 3, preparing=1)
    assert isinstance(flight.terminal, Failed)
    assert flight.terminal.code == Code.INTERNAL_ERROR
    assert "prepared" in flight.terminal.message
    assert cancel("huge") in line.sent_to("w")
    assert line.killed == []


def test_flights_that_wait_for_a_place_or_whose_prompt_gets_on_are_not_starved() -> None:
    line = Worked("first", "second", "third", rows=1)
    line.pass_time(3 * STALL_S, waiting("second"), waiting("third"), served="first")
    assert line.starved == 0
    line = Worked("long", "fine")
    for chunk in range(10):
        row = RequestStatus(id="long", phase="prefill", prompt_tokens=9999, prefilled=chunk)
        line.pass_time(STALL_S / 2, row, served="fine")
    assert line.starved == 0


def test_stopped_gateway_starves_nobody() -> None:
    line = Worked("a")
    line.pass_time(2, waiting("a"))
    line.clock.now += 100 * STALL_S
    line.beat("w", rows=[waiting("a")])
    line.dispatcher.sweep()
    assert line.flights[0].attempts == 1


def test_flight_that_no_worker_takes_ends_although_others_are_served() -> None:
    line = Worked("first", "second")
    first, second = line.flights
    # A draining worker finishes its requests, however long that takes, and gets no others.
    line.say("w", Draining(incarnation="w"))
    line.dispatcher.failover.resend(second, "a test")
    line.pass_time(WAIT_S_MAX - 2, served="first")
    assert second.terminal is None
    line.pass_time(5, served="first")
    assert code_of(second) == Code.WORKER_UNAVAILABLE
    assert first.terminal is None
