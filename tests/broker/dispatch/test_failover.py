"""Failover of flights whose worker is lost, and reconciliation after lost messages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.dispatch.failover import CRASHED, CRASHES_MAX, RESENDS_MAX
from broker.dispatch.flight import PROVEN_PIECES, Flight
from broker.dispatch.worker_messages import MISSED_HEARTBEATS_MAX
from protocol.errors import Code
from protocol.messages import Failed, Finished, Generate, PromptLogprobs
from protocol.types import BATCH_PRIORITY, Media, PromptToken, RequestStatus, Sampling, TokenizeOptions
from tests.broker.dispatcher_line import FAILOVER_S, SILENT_S, Line, cancel, code_of, text_of
from tests.factories import accepted, events, failed, finished, request, reused

TEXTS = ["x"] * PROVEN_PIECES


@pytest.fixture
def line() -> Line:
    return Line(waiting_max=64)


def distinct(id: str) -> Generate:
    return request(id, prompt=id)


def submit(line: Line, *ids: str) -> list[Flight]:
    """Open flights of distinct requests whose clients stay connected."""
    return [line.submit(distinct(id)) for id in ids]


# --- the next worker ---------------------------------------------------------------------------------


def test_a_flight_goes_on_with_the_next_worker_and_takes_its_images_along(line: Line) -> None:
    line.serving("w1", images=True)
    media = [Media(frame=0, mime="image/png", sha256="ab")]
    asked = request("a", media=media)
    with line.dispatcher.submit(line.dispatcher.find("m"), [asked], (b"image",)) as [flight]:
        line.say("w1", accepted("w1", "a"), reused("w1", "a"), events("w1", "a", "al", "l"))
        line.dispatcher.lost("w1")
        assert flight.attempt is None
        line.media.clear()
        line.hello("w2")
        assert line.attempts_sent_to("w2") == []
        line.serving("w2")
        assert line.generates("w2") == [replace(asked, id="a~2", resume=[0, 1])]
        assert line.media == {"a~2": [b"image"]}
        line.say("w2", accepted("w2", "a~2"), reused("w2", "a~2", 5), events("w2", "a~2", " aboard"))
        line.say("w1", events("w1", "a", "late", first=2))
        line.say("w2", finished("w2", "a~2", 3, cached=5))
        assert text_of(flight) == "all aboard"
        assert isinstance(flight.terminal, Finished)
        assert flight.terminal.usage.cached_tokens == 0
    assert line.dispatcher.dropped == {"unknown_sender": 1}
    counted = request("b", tokenizing=TokenizeOptions(tokens=True))
    told = accepted("w2", "b", prompt_tokens=2, tokens=[5, 6])
    with line.dispatcher.submit(line.dispatcher.find("m"), [counted], ()) as [flight]:
        line.say("w2", told)
        line.dispatcher.lost("w2")
        line.serving("w3")
        assert line.generates("w3") == [replace(counted, id="b~2")]
        line.say("w3", replace(told, incarnation="w3", id="b~2"), finished("w3", "b~2"))
        assert [told, flight.terminal] == flight.take()
        assert isinstance(flight.terminal, Finished)


@pytest.mark.parametrize("sign", ["token", "step", "none"])
def test_the_wait_is_counted_from_the_last_sign_that_somebody_is_at_work(sign: str, line: Line) -> None:
    line.serving("w1")
    flights = submit(line, "a", "b")
    line.dispatcher.lost("w1")
    if sign != "none":
        line.serving("w2", rows=1)
        [attempt] = line.attempts_sent_to("w2")
        line.clock.now += FAILOVER_S - 1
        if sign == "token":
            line.say("w2", events("w2", attempt, "x"))
        else:
            line.beat("w2", running=1, steps=1)
    line.clock.now += FAILOVER_S - 1
    line.beat("w2", steps=1)
    line.dispatcher.sweep()
    assert [flight.terminal for flight in flights] == [None, None]
    line.clock.now += 2
    line.beat("w2", steps=1)
    line.dispatcher.sweep()
    first = Code.WORKER_UNAVAILABLE if sign == "none" else None
    assert [code_of(flight) for flight in flights] == [first, Code.WORKER_UNAVAILABLE]


# --- requests that crash their worker ----------------------------------------------------------------


def die(line: Line, worker: str, successor: str, rows: int = 64) -> list[str]:
    """Lose the worker, start its successor, and return the attempts dispatched at once."""
    line.dispatcher.lost(worker)
    line.serving(successor, rows=rows)
    return line.attempts_sent_to(successor)


def prove(line: Line, worker: str, *attempts: str) -> None:
    for attempt in attempts:
        line.say(worker, events(worker, attempt, *TEXTS))


def test_all_aboard_at_a_death_go_back_one_by_one_as_far_as_there_are_rows(line: Line) -> None:
    line.serving("w1")
    submit(line, "a", "b", "c")
    prove(line, "w1", "a")
    assert die(line, "w1", "w2", rows=2) == ["a~2"]
    submit(line, "new")
    assert line.attempts_sent_to("w2") == []
    prove(line, "w2", "a~2")
    assert line.attempts_sent_to("w2") == ["b~2"]
    prove(line, "w2", "b~2")
    assert line.attempts_sent_to("w2") == []  # no row is free
    line.say("w2", finished("w2", "b~2", 2))
    assert line.attempts_sent_to("w2") == ["c~2"]
    line.say("w2", failed("w2", "c~2"))
    assert line.attempts_sent_to("w2") == ["new"]


def test_a_request_fails_at_its_third_death_and_none_beside_it(line: Line) -> None:
    line.serving("w1")
    other, poison = submit(line, "other", "poison")
    assert die(line, "w1", "w2") == ["other~2"]
    prove(line, "w2", "other~2")
    assert line.attempts_sent_to("w2") == ["poison~2"]
    assert die(line, "w2", "w3") == ["other~3"]
    prove(line, "w3", "other~3")
    assert line.attempts_sent_to("w3") == ["poison~3"]
    assert die(line, "w3", "w4") == ["other~4"]
    assert isinstance(poison.terminal, Failed)
    assert (poison.terminal.code, poison.terminal.message) == (Code.WORKER_CRASHED, CRASHED)
    line.say("w4", finished("w4", "other~4"))
    assert isinstance(other.terminal, Finished)


def test_a_line_of_a_batch_is_tried_without_others_and_keeps_none_waiting(line: Line) -> None:
    line.serving("w1")
    first = line.submit(distinct("first"))
    line.submit(replace(distinct("line"), priority=BATCH_PRIORITY))
    assert die(line, "w1", "w2") == ["first~2"]
    prove(line, "w2", "first~2")
    submit(line, "new")
    line.submit(replace(distinct("next"), priority=BATCH_PRIORITY))
    assert line.attempts_sent_to("w2") == ["new"]
    line.say("w2", finished("w2", "first~2"), finished("w2", "new"))
    assert isinstance(first.terminal, Finished)
    assert line.attempts_sent_to("w2") == ["line~2"]
    prove(line, "w2", "line~2")
    assert line.attempts_sent_to("w2") == ["next"]


def test_of_two_that_kill_both_are_found(line: Line) -> None:
    line.serving("w0")
    both = submit(line, "a", "b")
    crashes = 0
    while any(flight.terminal is None for flight in both):
        crashes += 1
        die(line, f"w{crashes - 1}", f"w{crashes}")
    assert [code_of(flight) for flight in both] == [Code.WORKER_CRASHED] * 2
    assert crashes == 2 * CRASHES_MAX - 1


def test_the_death_of_a_worker_that_wakes_is_withdrawn_and_one_that_is_gone_has_died_once(line: Line) -> None:
    line.hello("w0")
    line.dispatcher.lost("w0")  # it was not ready, which says nothing
    line.serving("w1")
    [flight] = submit(line, "a")
    die(line, "w1", "w2")
    for _ in range(3):
        line.clock.now += SILENT_S + 1
        line.dispatcher.sweep()
        assert flight.crash_count == 2
        line.beat("w2")
        assert flight.crash_count == 1
    assert flight.terminal is None
    assert flight.attempt is not None
    line.clock.now += SILENT_S + 1
    line.dispatcher.sweep()
    line.dispatcher.lost("w2")
    assert flight.crash_count == 2


# --- lost messages -----------------------------------------------------------------------------------


def scored(worker: str, id: str, first: int, count: int) -> PromptLogprobs:
    tokens = [PromptToken(bytes=b"x", logprob=-1)] * count
    return PromptLogprobs(incarnation=worker, id=id, first=first, tokens=tokens)


def test_request_whose_prompt_is_told_further_each_time_is_not_the_crash_cause(line: Line) -> None:
    line.serving("w1")
    flight = line.submit(replace(distinct("a"), echo=True, sampling=Sampling(seed=1, logprobs=1)))
    for number in range(1, 2 * CRASHES_MAX):
        assert flight.attempt is not None
        line.say(f"w{number}", accepted(f"w{number}", flight.attempt.id, prompt_tokens=1000))
        for first in (20 * number - 20, 20 * number - 10):
            line.say(f"w{number}", scored(f"w{number}", flight.attempt.id, first, 10))
        assert die(line, f"w{number}", f"w{number + 1}") == [f"a~{number + 1}"]
    assert (flight.scored, flight.terminal) == (20 * (2 * CRASHES_MAX - 1), None)


@pytest.mark.parametrize("gap", ["part", "delta", "end"])
def test_behind_a_gap_in_its_prompt_a_flight_is_told_on_where_the_client_is(gap: str, line: Line) -> None:
    line.serving("w")
    asks = replace(distinct("a"), echo=True, sampling=Sampling(seed=1, logprobs=1))
    flight = line.submit(asks)
    line.say("w", accepted("w", "a"), scored("w", "a", 0, 1), scored("w", "a", 0, 1))
    line.sent_to("w")
    late = {"part": scored("w", "a", 2, 1), "delta": events("w", "a", "x"), "end": finished("w", "a")}
    line.say("w", late[gap])
    assert line.sent_to("w") == [cancel("a"), replace(asks, id="a~2", scored=1)]
    line.say("w", accepted("w", "a~2"), scored("w", "a~2", 1, 2), events("w", "a~2", "x"))
    line.say("w", finished("w", "a~2", tokens=1))
    items = flight.take()
    assert [item.first for item in items if isinstance(item, PromptLogprobs)] == [0, 1]
    assert isinstance(flight.terminal, Finished)
    assert line.dispatcher.dropped["double"] == 1


def test_a_line_that_loses_something_every_time_fails_the_flight_in_the_end(line: Line) -> None:
    line.serving("w")
    [flight] = submit(line, "a")
    for _ in range(RESENDS_MAX):
        assert flight.attempt is not None
        line.say("w", events("w", flight.attempt.id, "z", first=1))
    assert flight.attempt is not None
    line.say("w", events("w", flight.attempt.id, "x"))  # one token counts as progress
    for _ in range(RESENDS_MAX + 1):
        assert flight.attempt is not None
        line.say("w", events("w", flight.attempt.id, "z", first=7))
    assert code_of(flight) == Code.INTERNAL_ERROR


def test_a_worker_that_says_more_than_was_asked_for_is_not_believed(line: Line) -> None:
    line.serving("w")
    flight = line.submit(replace(distinct("a"), max_tokens=2))
    line.say("w", events("w", "a", "x", "y", "z"))
    assert (line.dispatcher.dropped, line.attempts_sent_to("w")) == ({"beyond": 1}, ["a", "a~2"])
    line.say("w", finished("w", "a~2", tokens=2))
    assert text_of(flight) == "xy"


def row(id: str) -> RequestStatus:
    return RequestStatus(id=id, phase="decode", prompt_tokens=3)


def beats(line: Line, count: int, *rows: str, running: int | None = None, steps: bool = True) -> None:
    """Send `count` heartbeats with these rows, a quarter of a second apart."""
    for _ in range(count):
        line.clock.now += 0.25
        line.steps += steps
        held = len(rows) if running is None else running
        line.beat("w", running=held, steps=line.steps, rows=[row(id) for id in rows])


LONG_ENOUGH = 4 + MISSED_HEARTBEATS_MAX


@pytest.mark.parametrize("state", ["accepted", "idle"])
def test_a_flight_that_its_worker_does_not_know_is_sent_again(state: str, line: Line) -> None:
    line.serving("w")
    [*others, flight] = submit(line, *(["a"] if state == "idle" else ["other", "a"]))
    if state == "accepted":
        line.say("w", accepted("w", "a"), events("w", "a", "x"), events("w", "a", "x"))
    line.sent_to("w")
    known, steps = [other.id for other in others], state != "idle"  # an idle worker takes no steps
    beats(line, LONG_ENOUGH - 2, *known, steps=steps)
    assert line.sent_to("w") == []
    beats(line, 2, *known, steps=steps)
    resume = [0] if state == "accepted" else []
    assert line.sent_to("w") == [cancel("a"), replace(distinct("a"), id="a~2", resume=resume)]
    assert flight.terminal is None
    assert line.dispatcher.dropped["lost"] == 1
    assert line.dispatcher.dropped["double"] == (state == "accepted")


def test_worker_that_loses_a_flight_again_and_again_is_taken_out_of_service(line: Line) -> None:
    line.serving("w")
    [flight] = submit(line, "a")
    for _ in range(RESENDS_MAX + 1):
        beats(line, LONG_ENOUGH)
    assert flight.attempt is None
    assert flight.terminal is None
    line.serving("x")
    assert line.attempts_sent_to("x") == [f"a~{RESENDS_MAX + 2}"]
    for _ in range(LONG_ENOUGH):
        line.clock.now += 0.25
        line.beat("x")
    assert code_of(flight) == Code.INTERNAL_ERROR


@pytest.mark.parametrize("why", ["known", "young", "stuck", "preparing", "returns"])
def test_a_flight_that_may_be_there_yet_is_left_in_peace(why: str, line: Line) -> None:
    line.serving("w")
    submit(line, "other", "a")
    line.sent_to("w")
    match why:
        case "known":
            beats(line, 3 * LONG_ENOUGH, "other", "a")
        case "young":
            beats(line, 3, "other")
        case "stuck":
            beats(line, 3 * LONG_ENOUGH, "other", steps=False)
        case "preparing":
            beats(line, 3 * LONG_ENOUGH, "other", running=2)
        case _:
            for _ in range(5):
                beats(line, MISSED_HEARTBEATS_MAX - 1, "other")
                beats(line, 1, "other", "a")
    assert line.sent_to("w") == []
