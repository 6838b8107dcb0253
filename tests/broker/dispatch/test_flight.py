"""Flight: one end, nothing after it, text in order, bounded while the client does not read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch import flight as flight_module
from broker.dispatch.flight import PROVEN_PIECES, TOKENS_MAX, DeltaResult, Flight, Item
from broker.dispatch.flights import Flights
from protocol.errors import Code
from protocol.messages import (
    Accepted,
    Embed,
    EmbeddingChunk,
    Failed,
    Finished,
    Generate,
    PrefixHit,
    PromptLogprobs,
)
from protocol.types import CallDelta, Delta, PromptToken, Sampling, Timings, TokenLogprob, Usage
from tests import factories
from tests.factories import failed, request

WORKER = "w"
accepted = partial(factories.accepted, prompt_tokens=5)
reused = partial(factories.reused, "w", "a", tier="ram", miss="")
finished = partial(factories.finished, prompt=5, tokens=1)


def dispatched(asked: Generate | Embed | None = None, now: float = 10.0) -> tuple[Flights, Flight]:
    flights = Flights()
    flight = flights.open(asked or request(), "m", now)
    flights.assign(flight, WORKER, now)
    return flights, flight


def open_flight(max_tokens: int | None = None) -> Flight:
    return dispatched(request(max_tokens=max_tokens))[1]


def delta(sequence: int, text: str = "x", tokens: int = 1) -> Delta:
    return Delta(id="a", sequence=sequence, tokens=[7] * tokens, text=text)


def scoring_flights() -> tuple[Flights, Flight]:
    """Return a flight that asks for the logprobs of its five prompt tokens."""
    flights, flight = dispatched(request(echo=True, sampling=Sampling(seed=1, logprobs=1)))
    flight.accept(accepted())
    return flights, flight


def scored(first: int, count: int) -> PromptLogprobs:
    tokens = [PromptToken(bytes=b"x", logprob=-1)] * count
    return PromptLogprobs(incarnation=WORKER, id="a", first=first, tokens=tokens)


def test_the_parts_of_a_prompt_are_taken_in_order_and_once_before_the_answer() -> None:
    flight = open_flight()
    assert flight.score(scored(0, 3), 11.0) is DeltaResult.GAP, "before its acceptance"
    flight.end(failed())
    assert flight.score(scored(0, 3), 11.0) is DeltaResult.OVER
    flights, flight = scoring_flights()
    flight.identity = "one"
    assert flight.can_continue_on("other")
    assert flight.score(scored(0, 3), 11.0) is DeltaResult.TAKEN
    assert not flight.can_continue_on("other")
    assert flight.score(scored(0, 3), 11.0) is DeltaResult.DUPLICATE
    assert flight.score(scored(4, 1), 11.0) is DeltaResult.GAP
    assert flight.accept_delta(delta(0), 12.0) is DeltaResult.GAP
    assert flight.lacks(finished())
    flights.leave(flight, 12.0)
    again = flights.assign(flight, "worker-2", 13.0)
    assert (again.scored, again.resume) == (3, []), "how much of the prompt the client has"
    flight.accept(accepted())
    assert flight.score(scored(3, 2), 13.0) is DeltaResult.TAKEN
    assert flight.accept_delta(delta(0), 14.0) is DeltaResult.TAKEN
    assert not flight.lacks(finished())
    assert flight.take() == [accepted(), scored(0, 3), scored(3, 2), delta(0)]
    assert flight.started_at == 11.0


def test_tokens_beyond_what_a_flight_can_have_are_not_taken() -> None:
    for asked, context, most in ((3, 0, 3), (3, 100, 3), (100, 3, 3), (None, 3, 3), (None, 0, TOKENS_MAX)):
        flight = open_flight(max_tokens=asked)
        flight.limit(context)
        assert flight.tokens_max == most
    flight = open_flight(max_tokens=3)
    flight.limit(0)
    taken, excess = DeltaResult.TAKEN, DeltaResult.EXCESS
    given = [delta(0, tokens=2), delta(1, tokens=2), delta(1), delta(2), delta(2, tokens=1000)]
    results = [flight.accept_delta(each, now=11.0) for each in given]
    assert results == [taken, excess, taken, excess, excess]
    assert flight.tokens == [7] * 3
    assert flight.take() == [delta(0, tokens=2), delta(1)]
    without_tokens = open_flight(max_tokens=3)
    without_tokens.limit(0)
    results = [without_tokens.accept_delta(delta(number, tokens=0), now=11.0) for number in range(4)]
    assert results == [taken] * 3 + [excess]


@pytest.mark.parametrize(
    "large",
    [
        factories.delta("x" * 32_000),
        factories.delta(likelihoods=[TokenLogprob(bytes=b"x", logprob=-1.0, top=[(b"x", -1.0)] * 20)] * 10),
        factories.delta(calls=[CallDelta(index=0, name="x" * 16_000, arguments="x" * 16_000)]),
        factories.delta(calls=[CallDelta(index=n, id="c") for n in range(200)]),
    ],
    ids=["text", "likelihoods", "arguments", "calls"],
)
def test_undelivered_backlog_limit_counts_delta_size(large: Delta) -> None:
    flight = open_flight()
    taken = 0
    while flight.accept_delta(replace(large, sequence=taken), now=11.0) is DeltaResult.TAKEN:
        taken += 1
    assert 10 < taken < 20
    again = open_flight()
    for number in range(50):
        assert again.accept_delta(replace(large, sequence=number), now=11.0) is DeltaResult.TAKEN
        again.take()


@dataclass(frozen=True)
class Take:
    """Event: the client reads."""


@dataclass(frozen=True)
class Abort:
    """Event: the gateway ends the flight."""

    code: Code


histories = st.lists(
    st.one_of(
        st.just(accepted()),
        st.builds(reused, st.integers(0, 5)),
        st.builds(delta, st.integers(0, 6), st.text(max_size=3)),
        # Mostly the expected delta, or most histories would end early.
        st.just("next"),
        st.just("next"),
        st.just("next"),
        st.just(finished()),
        st.just(failed()),
        st.builds(Abort, st.sampled_from(Code)),
        st.just(Take()),
    ),
    min_size=5,
    max_size=40,
)


def result_of(given: Delta, taken: list[Delta]) -> DeltaResult:
    """Return the result for a delta after those that were taken, if the flight does not end."""
    if given.sequence > len(taken):
        return DeltaResult.GAP
    return DeltaResult.TAKEN if given.sequence == len(taken) else DeltaResult.DUPLICATE


@given(histories, st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_whatever_is_said_a_flight_ends_at_most_once_and_its_text_is_what_was_due(
    history: list[object], bound: int
) -> None:
    flight, taken = open_flight(), list[Item]()
    expected, ends = list[Delta](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight_module, "PENDING_DELTAS_MAX", bound)
        for event in history:
            ended = flight.terminal is not None
            match event:
                case Take():
                    taken += flight.take()
                case Accepted():
                    flight.accept(event)
                case PrefixHit():
                    fits = flight.accepted and flight.reuse is None and not flight.tokens and not ended
                    assert flight.reused(event) == fits
                case Finished() | Failed():
                    assert flight.end(event) != ended
                case Abort(code):
                    assert flight.fail(code) != ended
                case "next" | Delta():
                    given = event if isinstance(event, Delta) else delta(len(expected), str(len(expected)))
                    due = result_of(given, expected)
                    gain = flight.accept_delta(given, now=11.0)
                    assert gain is (due if flight.terminal is None else DeltaResult.OVER)
                    expected += [given] * (gain is DeltaResult.TAKEN)
            ends += flight.terminal is not None and not ended
            # The bound, one `Accepted` (with its `PrefixHit`) and the end.
            assert len(flight.pending) <= bound + 2
    taken += flight.take()
    assert [item for item in taken if isinstance(item, Delta)] == expected
    assert [d.sequence for d in expected] == list(range(len(expected)))
    assert len(flight.tokens) == len(expected)
    assert ends == sum(isinstance(item, Finished | Failed) for item in taken) == (flight.terminal is not None)
    assert [type(item) for item in taken].count(PrefixHit) == (flight.reuse is not None)
    if flight.terminal is not None:
        assert taken[-1] is flight.terminal


# --- attempts ----------------------------------------------------------------------------------------


def aboard_again(flights: Flights, flight: Flight, worker: str = "another") -> Generate:
    """Lose the flight's worker, and return the message of its next attempt."""
    flights.leave(flight, now=20.0)
    return flights.assign(flight, worker, now=21.0)


def test_a_leg_goes_on_behind_the_tokens_of_those_before_it() -> None:
    flights = Flights()
    flight = flights.open(request(deadline_s=30.0), "m", now=0.0)
    assert flights.assign(flight, WORKER, now=0.0) == request(deadline_s=30.0)
    flight.accept(accepted())
    assert flight.reused(reused(0))
    flight.accept_delta(delta(0, "x", tokens=2), now=1.0)
    flight.accept_delta(delta(1, "y"), now=1.0)
    again = aboard_again(flights, flight)
    # The deadline does not begin anew, and acceptance and reuse are told once.
    assert again == request("a~2", resume=[7, 7, 7], deadline_s=9.0)
    flight.accept(accepted())
    assert flight.reused(reused(5))
    assert not flight.reused(reused(5))
    assert flight.accept_delta(delta(0, "z"), now=2.0) is DeltaResult.TAKEN
    assert again.resume == [7, 7, 7]
    flights.leave(flight, now=40.0)
    assert flights.assign(flight, WORKER, now=41.0) == request("a~3", resume=[7] * 4, deadline_s=0.0)
    assert flight.take() == [accepted(), reused(0), delta(0, "x", tokens=2), delta(1, "y"), delta(0, "z")]


@pytest.mark.parametrize(("told", "reported", "cached"), [(None, 639, 5), (None, 2, 2), (4, 639, 4)])
def test_tokens_that_an_earlier_leg_computed_are_no_cache_hit(
    told: int | None, reported: int, cached: int
) -> None:
    flights, flight = dispatched()
    flight.accept(accepted())
    if told is not None:
        flight.reused(reused(told))
    flight.accept_delta(delta(0), now=1.0)
    aboard_again(flights, flight)
    usage = Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=reported)
    flight.end(finished(usage=usage, timings=Timings(decode_s=1.0)))
    assert isinstance(flight.terminal, Finished)
    assert flight.terminal.usage == replace(usage, cached_tokens=cached)
    assert flight.terminal.timings == Timings()


def test_a_leg_is_proven_by_its_own_deltas() -> None:
    flights, flight = dispatched()
    flight.accept_delta(delta(0), now=11.0)
    aboard_again(flights, flight)
    seen = []
    for number in range(PROVEN_PIECES):
        seen.append(flight.proven)
        flight.accept_delta(delta(number), now=1.0)
    assert seen == [False] * PROVEN_PIECES
    assert flight.proven


def test_a_flight_is_found_by_its_leg_and_its_worker_only() -> None:
    flights = Flights()
    flight, other, ended = (flights.open(request(id), "m", now=0.0) for id in "abc")
    assert flights.waiting() == flights.waiting("m") == [flight, other, ended]
    assert flights.waiting("another") == []
    with pytest.raises(ValueError, match="already open"):
        flights.open(request("a"), "m", now=1.0)
    for each, worker in ((ended, WORKER), (flight, WORKER), (other, "another")):
        flights.assign(each, worker, now=0.0)
    assert flights.assigned(WORKER) == [ended, flight], "in the order of their assignment"
    assert flights.find("a", WORKER) is flight
    assert flights.find("a", "another") is flights.find("d", WORKER) is None
    ended.end(finished())
    flights.leave(ended, now=5.0)
    flights.leave(flight, now=5.0)
    assert flights.assigned(WORKER) == []
    assert flights.find("a", WORKER) is None
    assert flight.accept_delta(delta(0), now=6.0) is DeltaResult.OVER, "nobody may speak of it"
    assert (flights.waiting(), flight.waiting_since) == ([flight], 5.0)
    flights.assign(flight, WORKER, now=7.0)
    assert flights.find("a", WORKER) is None
    assert flights.find("a~2", WORKER) is flight
    assert list(flights.attempts(WORKER)) == ["a~2"]
    for _ in range(2):
        flights.close(flight)
        assert (len(flights), flights.find("a~2", WORKER), list(flights.attempts(WORKER))) == (2, None, [])
    assert flights.open(request("a"), "m", now=8.0) is not flight


# --- embeddings: one vector per text, in any order, over any number of attempts --------------------------

COUNT = 4


def opened() -> tuple[Flights, Flight]:
    return dispatched(factories.embed(["x"] * COUNT))


def part(sequence: int, *places: int, vectors: bytes | None = None) -> EmbeddingChunk:
    packed = struct.pack(f"<{2 * len(places)}f", *range(2 * len(places))) if vectors is None else vectors
    return factories.encoded(sequence, places, packed)


UNSOUND: dict[str, EmbeddingChunk] = {
    "a text that is not there": part(0, COUNT), "one that was answered": part(0, 3),
    "one twice": part(0, 1, 1), "nothing": part(0), "no numbers": part(0, 1, vectors=b""),
    "half a number": part(0, 1, vectors=b"\0" * 6), "fewer than texts": part(0, 0, 1, vectors=b"\0" * 4),
}  # fmt: skip


@pytest.mark.parametrize("message", UNSOUND.values(), ids=UNSOUND)
def test_invalid_embedding_chunk_is_rejected(message: EmbeddingChunk) -> None:
    flights, flight = opened()
    flight.accept_delta(part(0, 3), 11.0)
    flights.leave(flight, 12.0)
    flights.assign(flight, WORKER, 12.0)
    assert flight.accept_delta(message, 12.0) is DeltaResult.EXCESS
    assert flight.answered == {3}


def test_the_next_leg_is_for_the_texts_that_are_left() -> None:
    flights, flight = opened()
    assert flight.accept_delta(delta(0), 11.0) is DeltaResult.EXCESS
    assert flight.accept_delta(part(0, 2, 0), 11.0) is DeltaResult.TAKEN
    flights.leave(flight, 12.0)
    request: Any = flights.assign(flight, "worker-2", 13.0)
    assert (request.id, request.answered) == ("a~2", [0, 2])
    assert isinstance(request, Embed)
    assert flight.accept_delta(part(0, 1, 3), 14.0) is DeltaResult.TAKEN
    assert not flight.lacks(finished())
    flight.end(finished())
    assert flight.accept_delta(part(2, 0), 15.0) is DeltaResult.OVER


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, COUNT), max_size=3))))
def test_whatever_a_worker_says_each_text_is_answered_once(said: list[tuple[int, list[int]]]) -> None:
    _, flight = opened()
    for sequence, places in said:
        flight.accept_delta(part(sequence, *places), 11.0)
    taken = [place for item in flight.take() if isinstance(item, EmbeddingChunk) for place in item.places]
    assert len(taken) == len(set(taken))
    assert set(taken) == flight.answered <= set(range(COUNT))
