"""Flights of embedding requests: one vector per text, in any order, over any number of attempts."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dispatch.flight import DeltaResult, Flight, Flights
from protocol.messages import Embed, EmbeddingChunk
from tests.factories import delta, embed, encoded, finished

WORKER = "w"
COUNT = 4


def opened() -> tuple[Flights, Flight]:
    flights = Flights()
    flight = flights.open(embed(["x"] * COUNT), "m", now=10.0)
    flights.assign(flight, WORKER, now=10.0)
    return flights, flight


def part(sequence: int, *places: int, vectors: bytes | None = None) -> EmbeddingChunk:
    packed = struct.pack(f"<{2 * len(places)}f", *range(2 * len(places))) if vectors is None else vectors
    return encoded(sequence, places, packed)


UNSOUND: dict[str, EmbeddingChunk] = {
    "a text that is not there": part(0, COUNT),
    "one that was answered": part(0, 3),
    "one twice": part(0, 1, 1),
    "nothing": part(0),
    "no numbers": part(0, 1, vectors=b""),
    "half a number": part(0, 1, vectors=b"\0" * 6),
    "fewer than texts": part(0, 0, 1, vectors=b"\0" * 4),
}


@pytest.mark.parametrize("message", UNSOUND.values(), ids=UNSOUND)
def test_invalid_embedding_chunk_is_rejected(message: EmbeddingChunk) -> None:
    flights, flight = opened()
    flight.encode(part(0, 3), 11.0)
    flights.leave(flight, 12.0)
    flights.assign(flight, WORKER, 12.0)
    assert flight.encode(message, 12.0) is DeltaResult.EXCESS
    assert flight.answered == {3}


def test_the_next_leg_is_for_the_texts_that_are_left() -> None:
    flights, flight = opened()
    assert flight.accept_delta(delta("x"), 11.0) is DeltaResult.EXCESS
    assert flight.encode(part(0, 2, 0), 11.0) is DeltaResult.TAKEN
    flights.leave(flight, 12.0)
    request: Any = flights.assign(flight, "worker-2", 13.0)
    assert (request.id, request.answered) == ("a~2", [0, 2])
    assert isinstance(request, Embed)
    assert flight.encode(part(0, 1, 3), 14.0) is DeltaResult.TAKEN
    assert not flight.lacks(finished())
    flight.end(finished())
    assert flight.encode(part(2, 0), 15.0) is DeltaResult.OVER


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, COUNT), max_size=3))))
def test_whatever_a_worker_says_each_text_is_answered_once(said: list[tuple[int, list[int]]]) -> None:
    _, flight = opened()
    for sequence, places in said:
        flight.encode(part(sequence, *places), 11.0)
    taken = [place for item in flight.take() if isinstance(item, EmbeddingChunk) for place in item.places]
    assert len(taken) == len(set(taken))
    assert set(taken) == flight.answered <= set(range(COUNT))
