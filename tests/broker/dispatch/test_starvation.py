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
    """Dispatcher with workers that send heartbeats and serve chosen requests only."""

    def __init__(self, *workers: str, rows: int = 4) -> None:
        super().__init__(waiting_max=99)
        self.answered: dict[str, int] = {}
        for worker in workers:
            self.serving(worker, rows=rows)

    def pass_time(
        self,
        seconds: float,
        *,
        served: dict[str, str],
        rows: dict[str, list[RequestStatus]] | None = None,
        preparing: int = 0,
    ) -> None:
        """Advance time. Each second each worker sends a heartbeat, and `served` requests get a token."""
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            self.steps += 1
            for id, worker in served.items():
                number = self.answered.get(id, 0)
                self.answered[id] = number + 1
                self.say(worker, events(worker, id, "x", first=number))
            for worker in [each.incarnation for each in self.dispatcher.fleet]:
                mine = [id for id, server in served.items() if server == worker]
                told = (rows or {}).get(worker, [])
                running = len(mine) + sum(row.phase != "waiting" for row in told)
                status = [RequestStatus(id=id, phase="decode", prompt_tokens=3) for id in mine]
                self.beat(
                    worker,
                    running=running,
                    steps=self.steps,
                    rows=[*status, *told],
                    waiting=len(told) + preparing,
                )
            self.dispatcher.sweep()


def waiting(id: str) -> RequestStatus:
    return RequestStatus(id=id, phase="waiting", prompt_tokens=3)


def test_worker_that_starves_a_flight_twice_is_taken_out_and_ended() -> None:
    line = Worked("w")
    flight = line.submit(request("lost"))
    line.say("w", accepted("w", "lost"))
    line.pass_time(STALL_S + 3, served={}, rows={"w": [waiting("lost")]})
    assert (flight.attempts, line.dispatcher.failover.counts["starved"]) == (2, 1)
    assert cancel("lost") in line.sent_to("w")
    line.say("w", accepted("w", "lost~2"))
    line.pass_time(STALL_S + 3, served={}, rows={"w": [waiting("lost~2")]})
    worker = line.dispatcher.fleet.get("w")
    assert worker is not None
    assert worker.verdict is HealthState.STARVING
    assert line.killed[0] == ("w", 1)
    assert flight.attempt is None
    assert not flight.suspect
    line.dispatcher.lost("w")
    line.serving("next")
    assert flight.attempt is not None
    assert flight.attempt.worker == "next"


def test_flight_that_is_never_prepared_fails_and_its_worker_stays() -> None:
    line = Worked("w")
    flight = line.submit(request("huge"))
    line.pass_time(STALL_S + 3, served={}, preparing=1)
    assert isinstance(flight.terminal, Failed)
    assert flight.terminal.code == Code.INTERNAL_ERROR
    assert "prepared" in flight.terminal.message
    assert cancel("huge") in line.sent_to("w")
    assert line.killed == []


def test_flights_that_wait_for_a_place_or_whose_prompt_gets_on_are_not_starved() -> None:
    line = Worked("w", rows=1)
    for id in ("first", "second", "third"):
        line.submit(request(id))
        line.say("w", accepted("w", id))
        line.clock.now += 0.1
    line.pass_time(3 * STALL_S, served={"first": "w"}, rows={"w": [waiting("second"), waiting("third")]})
    assert line.dispatcher.failover.counts["starved"] == 0
    line = Worked("w")
    for id in ("long", "fine"):
        line.submit(request(id))
        line.say("w", accepted("w", id))
        line.clock.now += 1
    for chunk in range(10):
        row = RequestStatus(id="long", phase="prefill", prompt_tokens=9999, prefilled=chunk)
        line.pass_time(STALL_S / 2, served={"fine": "w"}, rows={"w": [row]})
    assert line.dispatcher.failover.counts["starved"] == 0


def test_stopped_gateway_starves_nobody() -> None:
    line = Worked("w")
    flight = line.submit(request("a"))
    line.say("w", accepted("w", "a"))
    line.pass_time(2, served={}, rows={"w": [waiting("a")]})
    line.clock.now += 100 * STALL_S
    line.beat("w", rows=[waiting("a")])
    line.dispatcher.sweep()
    assert flight.attempts == 1


def test_flight_that_no_worker_takes_ends_although_others_are_served() -> None:
    line = Worked("w")
    first, second = line.submit(request("first")), line.submit(request("second"))
    for id in ("first", "second"):
        line.say("w", accepted("w", id))
    # A draining worker finishes its requests, however long that takes, and gets no others.
    line.say("w", Draining(incarnation="w"))
    line.dispatcher.failover.resend(second, "a test")
    line.pass_time(WAIT_S_MAX - 2, served={"first": "w"})
    assert second.terminal is None
    line.pass_time(5, served={"first": "w"})
    assert code_of(second) == Code.WORKER_UNAVAILABLE
    assert first.terminal is None
