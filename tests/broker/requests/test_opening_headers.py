"""Cache header of a response: one format for every report of a worker."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from broker.requests.opening_headers import cache_header
from protocol.messages import Finished, PrefixHit
from protocol.types import PrefixReuse
from tests.factories import accepted, events, finished, request, reused

FORM = re.compile(rb"hit=(\d+)/(\d+); tier=(ram|disk|none); miss=[A-Za-z0-9_.:-]{1,64}")


def flight(*, known: PrefixReuse | None = None, end: Finished | None = None) -> Flight:
    """Return a flight with a prompt of three tokens."""
    flights = Flights()
    flight = flights.open(request("a"), "m", now=0.0)
    flights.assign(flight, "w", now=0.0)
    flight.accept(accepted("w", "a"))
    if known is not None:
        assert flight.reused(PrefixHit(incarnation="w", id="a", reuse=known))
    if end is not None:
        flight.end(end)
    return flight


@pytest.mark.parametrize(
    ("told", "value"),
    [
        (PrefixReuse(miss="cold"), b"hit=0/3; tier=none; miss=cold"),
        (PrefixReuse(miss="cold", message=4, role="a b"), b"hit=0/3; tier=none; miss=cold; message=4:a_b"),
        (PrefixReuse(tokens=2, tier="ram", miss="incomplete"), b"hit=2/3; tier=ram; miss=incomplete"),
        (PrefixReuse(tokens=1, tier="tape", miss="a b;\r\nc: é"), b"hit=1/3; tier=none; miss=a_b___c:__"),
    ],
)
def test_one_answer_says_what_its_worker_said(told: PrefixReuse, value: bytes) -> None:
    assert cache_header([flight(known=told)], 1) == value


def test_a_worker_that_says_nothing_is_known_by_its_counts_in_the_end() -> None:
    silent = flight()
    assert cache_header([silent], 1) is None
    silent.accept_delta(events("w", "a", "x").deltas[0], now=1.0)
    assert cache_header([silent], 1) is None
    silent.end(finished("w", "a", cached=2))
    assert cache_header([silent], 1) == b"hit=2/3; tier=none; miss=unreported"


def test_several_answers_to_one_prompt_count_it_once_and_several_prompts_are_summed() -> None:
    first, copy = PrefixReuse(tokens=1, tier="disk", miss="diverged"), PrefixReuse(tokens=2, tier="ram")
    flights = [flight(known=copy), flight(known=first), flight(), flight()]
    assert cache_header(flights[:3], 1) == b"hit=1/3; tier=disk; miss=diverged"
    assert cache_header(flights, 2) is None
    flights[3].reused(reused("w", "a", 3, "ram"))
    assert cache_header(flights, 2) == b"hit=4/6; tier=disk; miss=diverged"


reuses = st.builds(PrefixReuse, tokens=st.integers(0, 3), tier=st.text(max_size=4), miss=st.text(max_size=80))


@settings(max_examples=40)
@given(st.lists(st.lists(reuses, min_size=2, max_size=2), min_size=1, max_size=3))
def test_whatever_workers_say_it_is_one_line_of_the_documented_form(
    prompts: Sequence[list[PrefixReuse]],
) -> None:
    value = cache_header([flight(known=told) for group in prompts for told in group], len(prompts))
    assert value is not None
    form = FORM.fullmatch(value)
    assert form is not None
    assert int(form[1]) == sum(min(told.tokens for told in group) for group in prompts)
    assert int(form[2]) == 3 * len(prompts)
