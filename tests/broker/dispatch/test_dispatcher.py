"""Dispatcher decisions, driven by messages and a manual clock."""

from __future__ import annotations

import logging

import pytest

from broker.dispatch.fleet import MODELS_MAX, Worker
from broker.dispatch.flight import LONG_S
from protocol.errors import Code, RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    ClearCache,
    Draining,
    Failed,
    Finished,
    Goodbye,
    Rejected,
    Welcome,
)
from protocol.types import PrefixReuse, TokenizeOptions
from tests.broker.dispatcher_line import HUNG_S, STALL_S, Line, cancel, code_of, refusal, text_of
from tests.factories import GATEWAY, accepted, cleared, events, failed, finished, request, reused


@pytest.fixture
def line() -> Line:
    return Line()


def welcome() -> Welcome:
    return Welcome(incarnation=GATEWAY, version=PROTOCOL_VERSION, orphan_s=60.0)


def refused(line: Line, worker: Worker, *ids: str) -> RequestError:
    """Return the error of requests that are refused, of which nothing stays behind."""
    before = len(line.dispatcher.flights)
    error = refusal(line.dispatcher.submit(worker, [request(id) for id in ids], ()).__enter__)
    assert len(line.dispatcher.flights) == before
    return error


# --- workers come and go -----------------------------------------------------------------------------


def test_a_worker_of_another_version_or_one_model_too_many_is_turned_away_and_told_why(line: Line) -> None:
    for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        line.hello("w", version=version)
        [rejected] = line.sent_to("w")
        assert isinstance(rejected, Rejected)
        assert str(version) in rejected.reason
        assert list(line.dispatcher.fleet) == []
    for number in range(MODELS_MAX):
        line.hello(f"w{number}", model=f"m{number}")
    line.hello("one-more", model="another")
    [rejected] = line.sent_to("one-more")
    assert isinstance(rejected, Rejected)
    assert len(line.dispatcher.fleet.models) == MODELS_MAX
    line.hello("a-second", model="m0")
    assert line.sent_to("a-second") == [welcome()]


def test_messages_about_a_flight_from_another_worker_are_dropped(line: Line) -> None:
    line.serving("w1")
    line.serving("w2")
    assert line.told[0].serving == [1]
    worker = line.dispatcher.fleet.get("w1")
    assert worker is not None
    with line.dispatcher.submit(worker, [request("a")], ()) as [flight]:
        line.say("w2", accepted("w2", "a"), events("w2", "a", "no"), finished("w2", "a"), failed("w2", "a"))
        line.say("w2", reused("w2", "a"))
        # Signed with another name than their connection's.
        line.say("w2", events("w1", "a", "no"), finished("w1", "a"))
        line.say("stranger", events("stranger", "a", "no"), finished("stranger", "a"))
        assert flight.take() == []
    assert line.sent_to("stranger") == [welcome(), welcome()], "it is asked who it is"
    assert line.sent_to("w1")[-1] == cancel("a"), "its client left"
    line.say("w1", events("w1", "a", "late"), finished("w1", "a"))
    assert line.dispatcher.dropped == {"no_flight": 7, "forged": 2, "unknown_sender": 2}


def test_long_answer_without_max_tokens_is_logged_once(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line.serving("w")
    line.submit(request("x"))
    line.submit(request("y", max_tokens=5000))
    for id in "xy":
        line.say("w", accepted("w", id), events("w", id, "so", " on"))
    for _ in range(3):
        line.clock.now += LONG_S / 2
        line.dispatcher.sweep()
    [told] = [record.getMessage() for record in caplog.records if "max_tokens" in record.getMessage()]
    assert told.startswith("x generates for 60 s without max_tokens: 2 tokens")


# --- several flights of one client -------------------------------------------------------------------


def test_choices_board_together_or_not_at_all(line: Line) -> None:
    line.serving("w", rows=1)  # eight may wait
    worker = line.dispatcher.find("m")
    never = refused(line, worker, *(str(number) for number in range(10)))
    assert (never.code, never.param) == (Code.INVALID_REQUEST, "n")
    assert "room for 9" in never.message
    with line.dispatcher.submit(worker, [request(id) for id in "abcdefg"], ()):
        line.sent_to("w")
        assert refused(line, worker, *"hij").code is Code.TEXT_GENERATION_BUSY
        assert line.sent_to("w") == []
        with line.dispatcher.submit(worker, [request(id) for id in "hi"], ()) as flights:
            assert [flight.id for flight in flights] == ["h", "i"]
    line.sent.clear()
    line.unsendable.add("b")
    assert refused(line, worker, *"abc").code is Code.INVALID_REQUEST
    assert cancel("a") in line.sent_to("w")
    line.unreachable.add("w")
    error = refused(line, worker, "a")
    assert error.code is Code.WORKER_UNAVAILABLE
    assert error.retry_after_s is not None


def test_choices_end_each_for_itself_and_those_at_work_are_cancelled_in_the_end(line: Line) -> None:
    line.serving("w")
    requests = [request(id) for id in "abcd"]
    with line.dispatcher.submit(line.dispatcher.find("m"), requests, ()) as flights:
        assert line.sent_to("w") == [welcome(), *requests]
        line.say("w", events("w", "b", "x"), finished("w", "b"), failed("w", "c"))
        line.say("w", failed("w", "b"), events("w", "b", "y"), finished("w", "c"))  # behind their ends
        assert [type(flight.terminal) for flight in flights] == [type(None), Finished, Failed, type(None)]
        assert text_of(flights[1]) == "x"
    assert line.sent_to("w") == [cancel("a"), cancel("d")]
    assert len(line.dispatcher.flights) == 0


# --- health, the end, and prefix caches ---------------------------------------------------------------


def test_repeated_and_unknown_messages_are_dropped(line: Line) -> None:
    line.serving("w")
    counted = request("t", tokenizing=TokenizeOptions(tokens=True))
    told = accepted(id="t", tokens=[1, 2, 3])
    with line.dispatcher.submit(line.dispatcher.find("m"), [request("a"), counted], ()) as [a, t]:
        line.say("w", accepted("w", "a"), reused("w", "a", 2, "disk", "evicted"), reused("w", "a", 3))
        line.say("w", events("w", "a", "x", "y"), events("w", "a", "y", "z", first=1), events("w", "c", "x"))
        line.dispatcher.on_message("w", events("other", "a", "x"))
        line.say("w", told, told, finished("w", "t"))
        assert text_of(a) == "xyz"
        assert a.reuse == PrefixReuse(tokens=2, tier="disk", miss="evicted")
        assert [type(item) for item in t.take()] == [Accepted, Finished]
    assert line.dispatcher.dropped["unexpected"] == 1


def test_how_long_a_finished_request_took_is_what_later_ones_are_told(line: Line) -> None:
    line.serving("w")
    for id, tokenizing, end in (
        ("failed", None, [failed("w", "failed")]),
        ("left", None, []),
        ("tokenized", TokenizeOptions(), [finished("w", "tokenized")]),
        ("generated", None, [finished("w", "generated")]),
    ):
        asked = request(id, tokenizing=tokenizing)
        with line.dispatcher.submit(line.dispatcher.find("m"), [asked], ()):
            line.clock.now += 7.0
            line.beat("w")
            line.say("w", accepted("w", id), *end)
        expected = 7.0 if id == "generated" else 1.0
        assert line.dispatcher.admission.retry_after_s(1) == expected


def test_a_worker_that_hangs_loses_its_flights_and_is_told_so_and_killed_in_the_end(line: Line) -> None:
    line.serving("w")
    flight = line.submit(request("a"))
    line.beat("w", running=1, steps=1)
    line.clock.now += STALL_S + 1
    line.beat("w", running=1, steps=1)
    line.sent_to("w")
    line.dispatcher.sweep()
    assert flight.attempt is None
    assert line.sent_to("w") == [cancel("a")]
    line.dispatcher.sweep()
    assert (line.sent_to("w"), line.killed) == ([], [])
    line.clock.now += HUNG_S + 1
    line.dispatcher.sweep()
    assert line.killed == [("w", 1)]


def test_a_gateway_that_stops_serves_what_clients_still_ask_and_ends_what_does_not_finish(line: Line) -> None:
    line.serving("w")
    line.dispatcher.stop()
    worker = line.dispatcher.find("m")
    with line.dispatcher.submit(worker, [request("a"), request("b")], ()) as [over, running]:
        line.sent_to("w")
        assert "shutting down" in refusal(line.dispatcher.check_ready).message
        line.say("w", events("w", "a", "x"), finished("w", "a"))
        line.dispatcher.fail_all()
        line.dispatcher.fail_all()
        assert isinstance(over.terminal, Finished)
        assert code_of(running) == Code.SHUTTING_DOWN
        assert line.sent_to("w") == [cancel("b")]
    refused = line.refusal()
    assert (refused.code, refused.retry_after_s) == (Code.SHUTTING_DOWN, 2.0)


def test_every_worker_that_serves_the_model_is_told_to_clear_its_cache_and_no_other(line: Line) -> None:
    line.serving("w1", "m")
    line.serving("w2", "m")
    line.serving("w3", "another")
    line.hello("w4", "m")
    with line.dispatcher.clear("m", "c") as cache_clear:
        for worker in ("w1", "w2"):
            assert line.sent_to(worker)[1:] == [ClearCache(incarnation=GATEWAY, id="c")]
        assert not [message for _, message in line.sent if isinstance(message, ClearCache)]
        line.say("w2", cleared("w2", "c", 10, 1), cleared("w2", "c", 10, 1))
        line.say("w3", cleared("w3", "c"))
        line.say("w1", cleared("w1", "an earlier one"))
        assert not cache_clear.over
        line.say("w1", cleared("w1", "c", 20, 2))
        assert cache_clear.over
        assert [(model, freed.ram_bytes) for model, freed in cache_clear.freed] == [("m", 10), ("m", 20)]
    line.say("w1", cleared("w1", "c"))
    assert line.dispatcher.dropped == {"no_clearing": 4}


def test_a_worker_that_is_lost_or_cannot_be_told_is_not_waited_for(line: Line) -> None:
    line.serving("w1")
    line.serving("w2")
    with line.dispatcher.clear(None, "c") as cache_clear:
        line.dispatcher.lost("w1")
        assert (cache_clear.over, cache_clear.died) == (True, "m")
    with line.dispatcher.clear(None, "d") as cache_clear:
        assert list(cache_clear.awaited) == ["w2"]
    line.unreachable.add("w2")
    for model, code in (("m", Code.WORKER_UNAVAILABLE), ("another", Code.MODEL_NOT_FOUND)):
        assert refusal(line.dispatcher.clear(model, "e").__enter__).code is code


def test_draining_worker_finishes_its_requests_and_gets_no_new_ones(line: Line) -> None:
    line.serving("w1")
    worker = line.dispatcher.find("m")
    assigned = line.submit(request("a"))
    line.say("w1", Draining(incarnation="w1"))
    assert worker.state == "draining"
    assert line.refusal().code is Code.WORKER_UNAVAILABLE
    line.serving("w2")
    # The worker was chosen before it drained; the request goes to another with the same model.
    with line.dispatcher.submit(worker, [request("b")], ()):
        assert line.attempts_sent_to("w2") == ["b"]
    line.say("w1", events("w1", "a", "on"))
    assert len(assigned.tokens) > 0
    line.say("w1", Goodbye(incarnation="w1", reason="out of time"))
    assert line.attempts_sent_to("w2") == ["a~2"]
    assert not assigned.is_suspect
