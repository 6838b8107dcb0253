"""Admission: a request is admitted or refused at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.dispatch.admission import BYTES_PER_TOKEN, RETRY_AFTER_S_MAX, Admission, guessed_tokens, has_begun
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Ready
from tests.broker.dispatcher_line import Clock, refusal
from tests.factories import accepted, delta, request, reused

BUSY = Code.TEXT_GENERATION_BUSY


def house(waiting_max: int, waiting_tokens_max: int | None = None) -> Admission:
    return Admission(clock=Clock(), waiting_max=waiting_max, waiting_tokens_max=waiting_tokens_max)


def worker(rows: int, tokens_max: int = 0) -> Ready:
    return Ready(incarnation="w", model="m", context_length=100, running_max=rows, tokens_max=tokens_max)


def asks(count: int = 1, text: str = "x") -> list[Generate]:
    return [request("new", prompt=text)] * count


def assigned(running: int, waiting: int) -> list[Flight]:
    flights = Flights()
    for number in range(running + waiting):
        id = f"{'running' if number < running else 'waiting'}-{number}"
        flight = flights.open(request(id), "m", now=0.0)
        flights.assign(flight, "w", now=0.0)
        if number < running:
            flight.accept_delta(delta(id=id), now=1.0)
    return flights.assigned("w")


def refused(admission: Admission, running: int, waiting: int, rows: int) -> RequestError:
    error = refusal(admission.check, assigned(running, waiting), worker(rows), asks())
    assert error.code is BUSY
    return error


@pytest.mark.parametrize(("rows", "waiting_max"), [(1, 0), (4, 5)])
def test_a_worker_gets_its_rows_and_so_many_more(rows: int, waiting_max: int) -> None:
    admission = house(waiting_max=waiting_max)
    for count in range(rows + waiting_max):
        present = assigned(min(count, rows), max(0, count - rows))
        assert not admission.is_full(present, worker(rows))
        admission.check(present, worker(rows), asks())
    assert admission.is_full(assigned(rows, waiting_max), worker(rows))
    refused(admission, rows, waiting_max, rows)
    refused(admission, rows, waiting_max + 7, rows)


def test_a_refusal_says_who_runs_and_who_waits_and_names_no_more_than_a_few() -> None:
    error = refused(house(waiting_max=1), running=2, waiting=1, rows=2)
    ids = {"running_ids": ["running-0", "running-1"], "waiting_ids": ["waiting-2"]}
    assert error.details == {"running": 2, "waiting": 1, **ids}
    assert error.message == (
        "The server is at capacity: 2 requests are running and 1 are waiting."
        " Running: running-0, running-1. Waiting: waiting-2."
    )
    assert (error.kind.status, error.kind.retryable) == (503, True)
    error = refused(house(waiting_max=500), running=500, waiting=500, rows=500)
    assert (error.details["running"], error.details["waiting"]) == (500, 500)
    assert error.message.count("running-") == error.message.count("waiting-") == 16
    assert error.message.count(" and 484 more.") == 2


def test_a_request_runs_from_when_its_worker_has_taken_it_up() -> None:
    [flight] = assigned(running=0, waiting=1)
    flight.accept(accepted(id=flight.id))
    assert not has_begun(flight)
    flight.reused(reused(id=flight.id))
    assert has_begun(flight)
    error = house(waiting_max=0).busy([flight])
    assert (error.details["running"], error.details["waiting"]) == (1, 0)


# --- waiting prompts ---------------------------------------------------------------------------------


def counted(flights: list[Flight], tokens: int) -> list[Flight]:
    """Report `tokens` prompt tokens for each flight, as its worker would."""
    for flight in flights:
        flight.accept(accepted(id=flight.id, prompt_tokens=tokens))
    return flights


@pytest.mark.parametrize(("limit", "tokens_max", "most"), [(40, 1000, 40), (None, 10, 40), (0, 1000, 0)])
def test_prompts_wait_up_to_so_many_tokens_together(limit: int | None, tokens_max: int, most: int) -> None:
    admission = house(waiting_max=100, waiting_tokens_max=limit)
    one = asks(text="x" * BYTES_PER_TOKEN)
    room = most - guessed_tokens(one[0])
    if room > 0:
        admission.check(counted(assigned(2, 1), room), worker(4, tokens_max), one)
    error = refusal(admission.check, counted(assigned(2, 1), room + 1), worker(4, tokens_max), one)
    assert (error.code, error.retry_after_s) == (BUSY, 1.0)
    assert error.message.startswith(f"Waiting prompts have {room + 1} tokens")
    assert "Waiting: waiting-2." in error.message


def test_long_prompt_is_admitted_when_the_queue_is_empty_or_memory_is_unknown() -> None:
    long = asks(text="x" * 10**4)
    house(waiting_max=4, waiting_tokens_max=10).check(counted(assigned(3, 0), 10**6), worker(4), long)
    house(waiting_max=4).check(counted(assigned(1, 2), 10**9), worker(1), asks())


def test_waiting_prompt_counts_as_no_more_than_the_context() -> None:
    # Its worker is about to refuse it, so it must not keep others out.
    admission = house(waiting_max=50, waiting_tokens_max=150)
    [flight] = assigned(0, 1)
    flight.request = asks(text="x" * 10**6)[0]
    admission.check([flight], worker(1), asks())
    assert refusal(admission.check, [flight], replace(worker(1), context_length=0), asks()).code is BUSY
    assert refusal(admission.check, [flight], worker(1), asks(text="x" * 10**6)).code is BUSY


def test_a_prompt_is_guessed_until_its_worker_has_counted_it() -> None:
    admission = house(waiting_max=50, waiting_tokens_max=100)
    [flight] = assigned(0, 1)
    flight.request = asks(text="x" * 90 * BYTES_PER_TOKEN)[0]
    text = "x" * 10 * BYTES_PER_TOKEN
    assert refusal(admission.check, [flight], worker(1), asks(text=text)).code is BUSY
    admission.check(counted([flight], 20), worker(1), asks(text=text))
    copies = asks(8, text=text)
    assert refusal(admission.check, [flight], worker(1), copies).code is BUSY, "each copy is one more"


def test_all_that_becomes_a_prompt_has_a_size() -> None:
    text = "x" * 100 * BYTES_PER_TOKEN
    bare = request("new", prompt=None)
    assert guessed_tokens(bare) == 1
    for fields in ({"prompt": text}, {"messages": pack(text)}, {"tools": pack(text)}):
        assert 100 <= guessed_tokens(replace(bare, **fields)) <= 103
    assert guessed_tokens(replace(bare, prompt="\ud83d")) == 1  # it cannot be encoded for a worker either


# --- Retry-After -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durations_s", "count", "expected"),
    [
        ([], 16, 1.0), ([9.0], 4, 3.0), ([8.0], 64, 1.0), ([8.0], 0, 8.0), ([1e6], 1, RETRY_AFTER_S_MAX),
        ([10.0, 20.0], 1, 12.0),
    ],
)  # fmt: skip
def test_a_place_is_expected_after_the_measured_time_divided_by_those_aboard(
    durations_s: list[float], count: int, expected: float
) -> None:
    admission = house(waiting_max=0)
    for duration_s in durations_s:
        admission.served(duration_s)
    assert admission.retry_after_s(count) == expected


def test_places_are_promised_one_by_one_and_none_for_later_than_all_have_left() -> None:
    clock = Clock()
    admission = Admission(clock=clock, waiting_max=0)
    admission.served(12.0)
    present = assigned(running=4, waiting=0)
    promises = [admission.busy(present).retry_after_s for _ in range(6)]
    assert promises == [3.0, 6.0, 9.0, 12.0, 12.0, 12.0]
    clock.now += 6.0
    assert admission.busy(present).retry_after_s == 9.0
    clock.now += 60.0
    assert admission.busy(present).retry_after_s == 3.0
