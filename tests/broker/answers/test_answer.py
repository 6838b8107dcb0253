"""Answers that are not durable: what they keep, when they stop, and how their flights are closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from broker.answers.answer import Answer, Scheduler
from broker.answers.open_flights import OpenFlights
from broker.api.rendering import ChatRendering
from broker.dispatch.flights import Flights
from protocol.types import Delta
from tests.factories import accepted, failed, finished, request


@dataclass
class Talk:
    """An answer of one flight with one reader, on an event loop that the test turns."""

    due: list[Callable[[], object]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    """Statuses with which the flight was logged."""
    position: int = 0

    def __post_init__(self) -> None:
        flights = Flights()
        self.flight = flights.open(request(), "m", 0.0)
        self.id = flights.assign(self.flight, "w", 0.0).id
        self.answer = Answer(Scheduler(lambda: 1.0, self.due.append, lambda delay_s, call: None))
        self.answer.attach(self.wake)
        rendering = ChatRendering(id="x", model="m", created=1, stream=True)
        opened = OpenFlights(
            nullcontext([self.flight]), on_end=lambda flight, status: self.closed.append(status)
        )
        self.answer.open(opened, rendering.renderer(lambda: "fp"))

    def wake(self) -> None:
        pass

    def say(self, count: int = 1) -> None:
        self.flight.accept(accepted("w", self.id))
        for _ in range(count):
            number = len(self.flight.tokens)
            self.flight.accept_delta(Delta(id=self.id, sequence=number, tokens=[1], text=f"<{number}>"), 0.0)

    def turn(self) -> None:
        while self.due:
            self.due.pop(0)()

    def read(self) -> bytes:
        body, self.position = self.answer.read(self.position)
        return body


def test_only_what_its_reader_has_not_read_is_kept() -> None:
    talk = Talk()
    for number in range(100):
        talk.say()
        talk.turn()
        assert len(talk.answer.chunks) == 1
        assert b"<%d>" % number in talk.read()
        assert talk.answer.chunks == []
    talk.flight.end(finished("w", talk.id, 100))
    talk.turn()
    assert not talk.answer.ends_at(talk.position)
    assert talk.read().endswith(b"data: [DONE]\n\n")
    assert talk.answer.ends_at(talk.position)
    assert talk.closed == [200]


def test_output_stays_in_its_flights_while_its_reader_sends() -> None:
    talk = Talk()
    talk.answer.pause()
    assert talk.flight.unread_since == 1.0
    talk.say(3)
    talk.turn()
    assert (len(talk.flight.pending), talk.answer.visible) == (4, 0)
    talk.answer.resume()
    assert talk.flight.unread_since is None
    assert b"<2>" in talk.read()


def test_it_ends_with_its_reader() -> None:
    talk = Talk()
    talk.say()
    talk.answer.detach(talk.wake)
    assert talk.closed == [499]
    talk.turn()
    assert (talk.closed, talk.answer.over, talk.answer.chunks) == ([499], True, [])


def test_an_error_before_its_first_output_has_its_status() -> None:
    talk = Talk()
    talk.flight.end(failed("w", talk.id, "text_generation_busy"))
    talk.turn()
    assert talk.answer.end is not None
    assert talk.answer.end.error is not None
    assert talk.closed == [503]
