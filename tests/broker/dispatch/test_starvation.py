"""Starvation: a flight without progress on a working worker is resent, by the gateway's clock."""

from __future__ import annotations

from broker.dispatch.failover import WAIT_S_MAX
from broker.dispatch.fleet import HealthState
from protocol.errors import Code
from protocol.messages import Cancel, Draining, Failed, Generate
from protocol.types import RequestStatus
from tests.broker.dispatcher_line import STALL_S, Line
from tests.factories import GATEWAY, accepted, events, request


class Worked:
    """Dispatcher with workers that send heartbeats and serve chosen requests only."""

    def __init__(self, *workers: str, rows: int = 4) -> None:
        self.line = Line(waiting_max=99)
        self.steps = 0
        self.answered: dict[str, int] = {}
        for worker in workers:
            self.line.serving(worker, rows=rows)

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
            self.line.clock.now += 1.0
            self.steps += 1
            for id, worker in served.items():
                number = self.answered.get(id, 0)
                self.answered[id] = number + 1
                self.line.say(worker, events(worker, id, "x", first=number))
            for worker in [each.incarnation for each in self.line.dispatcher.fleet]:
                mine = [id for id, server in served.items() if server == worker]
                told = (rows or {}).get(worker, [])
                running = len(mine) + sum(row.phase != "waiting" for row in told)
                status = [RequestStatus(id=id, phase="decode", prompt_tokens=3) for id in mine]
                self.line.beat(
                    worker,
                    running=running,
                    steps=self.steps,
                    rows=[*status, *told],
                    waiting=len(told) + preparing,
                )
            self.line.dispatcher.sweep()


def waiting(id: str) -> RequestStatus:
    return RequestStatus(id=id, phase="waiting", prompt_tokens=3)


def test_flight_that_is_overtaken_and_gets_nothing_is_sent_again() -> None:
    world = Worked("w")
    lost = world.line.submit(request("lost"))
    world.line.say("w", accepted("w", "lost"))
    world.line.clock.now += 1
    fine = world.line.submit(request("fine"))
    world.line.say("w", accepted("w", "fine"))
    world.line.sent_to("w")
    world.pass_time(STALL_S - 2, served={"fine": "w"}, rows={"w": [waiting("lost")]})
    assert world.line.sent_to("w") == []
    world.pass_time(5, served={"fine": "w"}, rows={"w": [waiting("lost")]})
    cancel, again = world.line.sent_to("w")
    assert cancel == Cancel(incarnation=GATEWAY, id="lost")
    assert isinstance(again, Generate)
    assert again.id == "lost~2"
    assert lost.terminal is None
    assert fine.attempts == 1
    assert world.line.dispatcher.failover.counts["starved"] == 1


def test_worker_that_starves_a_flight_twice_is_taken_out_and_ended() -> None:
    world = Worked("w")
    flight = world.line.submit(request("lost"))
    world.line.say("w", accepted("w", "lost"))
    world.pass_time(STALL_S + 3, served={}, rows={"w": [waiting("lost")]})
    assert flight.attempts == 2
    world.line.say("w", accepted("w", "lost~2"))
    world.pass_time(STALL_S + 3, served={}, rows={"w": [waiting("lost~2")]})
    worker = world.line.dispatcher.fleet.get("w")
    assert worker is not None
    assert worker.verdict is HealthState.STARVING
    assert world.line.killed[0] == ("w", 1)
    assert flight.attempt is None
    assert not flight.suspect
    world.line.dispatcher.lost("w")
    world.line.serving("next")
    assert flight.attempt is not None
    assert flight.attempt.worker == "next"


def test_flight_that_is_never_prepared_fails_and_its_worker_stays() -> None:
    world = Worked("w")
    flight = world.line.submit(request("huge"))
    world.pass_time(STALL_S + 3, served={}, preparing=1)
    assert isinstance(flight.terminal, Failed)
    assert flight.terminal.code == Code.INTERNAL_ERROR
    assert "prepared" in flight.terminal.message
    assert Cancel(incarnation=GATEWAY, id="huge") in world.line.sent_to("w")
    assert world.line.killed == []


def test_flights_that_wait_for_a_place_or_whose_prompt_gets_on_are_not_starved() -> None:
    world = Worked("w", rows=1)
    for id in ("first", "second", "third"):
        world.line.submit(request(id))
        world.line.say("w", accepted("w", id))
        world.line.clock.now += 0.1
    world.pass_time(3 * STALL_S, served={"first": "w"}, rows={"w": [waiting("second"), waiting("third")]})
    assert world.line.dispatcher.failover.counts["starved"] == 0
    world = Worked("w")
    for id in ("long", "fine"):
        world.line.submit(request(id))
        world.line.say("w", accepted("w", id))
        world.line.clock.now += 1
    for chunk in range(10):
        row = RequestStatus(id="long", phase="prefill", prompt_tokens=9999, prefilled=chunk)
        world.pass_time(STALL_S / 2, served={"fine": "w"}, rows={"w": [row]})
    assert world.line.dispatcher.failover.counts["starved"] == 0


def test_stopped_gateway_starves_nobody() -> None:
    world = Worked("w")
    flight = world.line.submit(request("a"))
    world.line.say("w", accepted("w", "a"))
    world.pass_time(2, served={}, rows={"w": [waiting("a")]})
    world.line.clock.now += 100 * STALL_S
    world.line.beat("w", rows=[waiting("a")])
    world.line.dispatcher.sweep()
    assert flight.attempts == 1


def test_flight_that_no_worker_takes_ends_although_others_are_served() -> None:
    world = Worked("w")
    first, second = world.line.submit(request("first")), world.line.submit(request("second"))
    for id in ("first", "second"):
        world.line.say("w", accepted("w", id))
    # A draining worker finishes its requests, however long that takes, and gets no others.
    world.line.say("w", Draining(incarnation="w"))
    world.line.dispatcher.failover.resend(second, "a test")
    world.pass_time(WAIT_S_MAX - 2, served={"first": "w"})
    assert second.terminal is None
    world.pass_time(5, served={"first": "w"})
    assert isinstance(second.terminal, Failed)
    assert second.terminal.code == Code.WORKER_UNAVAILABLE
    assert first.terminal is None
