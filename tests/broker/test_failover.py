"""Flights that lose their worker, and what is done about what the line has lost."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.__main__ import kill
from broker.failover import MENDS_MAX
from broker.inflight import PROVEN_DELTAS, Flight
from broker.reconcile import BEATS_MISSED_MAX
from broker.suspects import REMEMBERED_MAX, REMEMBERED_S, fingerprint
from protocol.errors import Code, RequestError
from protocol.messages import Cancel, Delta, Failed, Finished, Generate, Goodbye, Media, RowStatus
from tests.broker.line import (
    FAILOVER_S,
    GATEWAY,
    SILENT_S,
    Line,
    accepted,
    events,
    failed,
    finished,
    request,
    reused,
)

TEXTS = ["x"] * PROVEN_DELTAS


@pytest.fixture
def line() -> Line:
    return Line(waiting_max=64)


def distinct(id: str) -> Generate:
    return replace(request(id), prompt=id)


def board(line: Line, *ids: str) -> list[Flight]:
    """Flights of clients who stay, each with a request of its own."""
    return [line.board(distinct(id)) for id in ids]


def text_of(flight: Flight) -> str:
    return "".join(item.text for item in flight.take() if isinstance(item, Delta))


def code_of(flight: Flight) -> str | None:
    return flight.terminal.code if isinstance(flight.terminal, Failed) else None


def generates(line: Line, worker: str) -> list[Generate]:
    return [message for message in line.sent_to(worker) if isinstance(message, Generate)]


# --- the next worker ---------------------------------------------------------------------------------


def test_a_flight_goes_on_with_the_next_worker_and_takes_its_images_along(line: Line) -> None:
    line.serving("w1", images=True)
    media = [Media(frame=0, mime="image/png", sha256="ab")]
    asked = replace(request("a"), media=media)
    with line.dispatcher.board(line.dispatcher.find("m"), [asked], (b"image",)) as [flight]:
        line.say("w1", accepted("w1", "a"), reused("w1", "a"), events("w1", "a", "al", "l"))
        line.dispatcher.lost("w1")
        assert flight.leg is None
        line.media.clear()
        line.hello("w2")
        assert line.legs_sent_to("w2") == []
        line.serving("w2")
        assert generates(line, "w2") == [replace(asked, id="a~2", resume=[0, 1])]
        assert line.media == {"a~2": [b"image"]}
        line.say("w2", accepted("w2", "a~2"), reused("w2", "a~2", 5), events("w2", "a~2", " aboard"))
        line.say("w1", events("w1", "a", "late", first=2))
        line.say("w2", finished("w2", "a~2", 3, cached=5))
        assert text_of(flight) == "all aboard"
        assert isinstance(flight.terminal, Finished)
        assert flight.terminal.usage.cached_tokens == 0
    assert line.dispatcher.dropped == {"unknown_sender": 1}


def test_another_worker_of_the_same_model_takes_over_at_once_and_one_of_another_model_never(
    line: Line,
) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    line.serving("w2", "another")
    line.serving("w3")
    line.dispatcher.lost("w1")
    assert line.legs_sent_to("w2") == []
    assert line.legs_sent_to("w3") == ["a~2"]
    assert flight.leg is not None
    assert flight.leg.worker == "w3"


def test_a_worker_that_cannot_be_reached_is_tried_again_with_the_next_sweep(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    line.dispatcher.lost("w1")
    line.unreachable.add("w2")
    line.serving("w2")
    assert flight.leg is None
    line.unreachable.clear()
    line.dispatcher.sweep()
    assert flight.leg is not None


def test_a_request_that_the_next_worker_refuses_fails_like_any_other(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    line.dispatcher.lost("w1")
    line.serving("w2")
    line.say("w2", failed("w2", "a~2", "context_length_exceeded"))
    assert code_of(flight) == "context_length_exceeded"


def test_a_client_that_leaves_while_its_flight_waits_frees_it_at_once(line: Line) -> None:
    line.serving("w1")
    with line.dispatcher.board(line.dispatcher.find("m"), [request("a")], ()):
        line.dispatcher.lost("w1")
        line.sent.clear()
    assert len(line.dispatcher.flights) == 0
    assert line.dispatcher.flights.waiting() == []
    line.serving("w2")
    assert line.legs_sent_to("w2") == []
    assert not [message for _, message in line.sent if isinstance(message, Cancel)]


def test_who_comes_while_there_is_no_worker_is_refused_at_once(line: Line) -> None:
    line.serving("w1")
    worker = line.dispatcher.find("m")
    line.dispatcher.lost("w1")
    with pytest.raises(RequestError) as caught:
        line.dispatcher.find("m")
    assert caught.value.code is Code.WORKER_UNAVAILABLE
    with pytest.raises(RequestError) as caught, line.dispatcher.board(worker, [request("b")], ()):
        pass
    assert caught.value.code is Code.WORKER_UNAVAILABLE
    assert caught.value.retry_after_s is not None
    assert len(line.dispatcher.flights) == 0


def test_the_wait_for_a_worker_ends_after_so_long(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    line.dispatcher.lost("w1")
    line.clock.now += FAILOVER_S
    line.dispatcher.sweep()
    assert flight.terminal is None
    line.clock.now += 0.1
    line.dispatcher.sweep()
    assert code_of(flight) == Code.WORKER_UNAVAILABLE


@pytest.mark.parametrize("sign", ["token", "step"])
def test_the_wait_is_counted_from_the_last_sign_that_somebody_is_at_work(sign: str, line: Line) -> None:
    line.serving("w1")
    flights = board(line, "a", "b")
    line.dispatcher.lost("w1")
    line.serving("w2")  # takes one of the two
    [leg] = line.legs_sent_to("w2")
    line.clock.now += FAILOVER_S - 1
    if sign == "token":
        line.say("w2", events("w2", leg, "x"))
    else:
        line.beat("w2", running=1, steps=1)
    line.clock.now += FAILOVER_S - 1
    line.beat("w2", steps=1)
    line.dispatcher.sweep()
    assert [flight.terminal for flight in flights] == [None, None]
    line.clock.now += 2
    line.beat("w2", steps=1)
    line.dispatcher.sweep()
    assert [code_of(flight) for flight in flights] == [None, Code.WORKER_UNAVAILABLE]


def test_a_gateway_that_goes_ends_those_that_wait_too(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    line.dispatcher.lost("w1")
    line.dispatcher.stop()
    line.dispatcher.abandon()
    assert code_of(flight) == Code.SHUTTING_DOWN


def test_only_what_can_be_the_process_of_a_worker_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(pid))
    for pid in (4242, 1, 0, -1, os.getpid()):
        kill(pid)
    assert killed == [4242]


# --- suspects ----------------------------------------------------------------------------------------


def die(line: Line, worker: str, successor: str) -> list[str]:
    """What the successor is sent at once."""
    line.dispatcher.lost(worker)
    line.serving(successor, rows=64)
    return line.legs_sent_to(successor)


def test_those_aboard_at_a_death_go_back_one_at_a_time(line: Line) -> None:
    line.serving("w1")
    board(line, "a", "b", "c")
    line.say("w1", events("w1", "a", "x", "y"))
    assert die(line, "w1", "w2") == ["a~2"]
    line.say("w2", accepted("w2", "a~2"), events("w2", "a~2", *TEXTS[1:]))
    assert line.legs_sent_to("w2") == []
    line.say("w2", events("w2", "a~2", "z", first=PROVEN_DELTAS - 1))
    assert line.legs_sent_to("w2") == ["b~2"]
    line.say("w2", finished("w2", "b~2"))
    assert line.legs_sent_to("w2") == ["c~2"]


def test_newcomers_wait_until_the_last_suspect_has_proven_itself(line: Line) -> None:
    line.serving("w1")
    board(line, "a")
    assert die(line, "w1", "w2") == ["a~2"]
    [newcomer] = board(line, "new")
    assert line.legs_sent_to("w2") == []
    line.say("w2", events("w2", "a~2", *TEXTS))
    assert generates(line, "w2") == [distinct("new")]
    assert not newcomer.suspect


def test_newcomers_go_to_a_worker_that_tries_nobody(line: Line) -> None:
    line.serving("w1")
    board(line, "a")
    line.serving("w2")
    line.dispatcher.lost("w1")
    line.serving("w3")
    assert line.legs_sent_to("w2") == ["a~2"]
    assert line.dispatcher.find("m").incarnation == "w3"


def test_a_request_that_dies_alone_twice_is_guilty_and_refused_for_ten_minutes(line: Line) -> None:
    line.serving("w1")
    poison, other = board(line, "poison", "other")
    assert die(line, "w1", "w2") == ["poison~2"]
    assert die(line, "w2", "w3") == ["other~2"]  # the charged one goes last
    line.say("w3", events("w3", "other~2", *TEXTS))
    assert line.legs_sent_to("w3") == ["poison~3"]
    assert die(line, "w3", "w4") == ["other~3"]
    assert code_of(poison) == Code.WORKER_CRASHED
    line.say("w4", finished("w4", "other~3"))
    assert isinstance(other.terminal, Finished)

    again = replace(distinct("poison"), id="again", sampling=replace(request("a").sampling, seed=2))
    worker = line.dispatcher.find("m")
    with pytest.raises(RequestError) as caught, line.dispatcher.board(worker, [again], ()):
        pass
    assert caught.value.code is Code.WORKER_CRASHED
    assert line.legs_sent_to("w4") == []
    line.clock.now += REMEMBERED_S
    line.beat("w4")
    with line.dispatcher.board(worker, [again], ()):
        assert line.legs_sent_to("w4") == ["again"]


def test_who_has_proven_itself_beside_a_suspect_that_dies_flies_on_unsuspected(line: Line) -> None:
    line.serving("w1")
    cleared, charged = board(line, "a", "b")
    die(line, "w1", "w2")
    line.say("w2", events("w2", "a~2", *TEXTS))
    assert line.legs_sent_to("w2") == ["b~2"]
    assert die(line, "w2", "w3") == ["a~3"]
    assert (cleared.suspect, charged.suspect) == (False, True)
    line.say("w3", events("w3", "a~3", *TEXTS))
    assert line.legs_sent_to("w3") == ["b~3"]


def test_a_charge_is_forgotten_when_its_request_gets_past_the_point(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    for number in range(1, 9, 2):  # each time it is charged, then gets through
        die(line, f"w{number}", f"w{number + 1}")
        [_] = die(line, f"w{number + 1}", f"w{number + 2}")
        assert flight.leg is not None
        line.say(f"w{number + 2}", events(f"w{number + 2}", flight.leg.id, *TEXTS))
    assert flight.terminal is None
    assert line.dispatcher.failover.suspects.charges(flight) == 0


def test_who_was_charged_with_the_death_of_a_worker_that_wakes_is_acquitted(line: Line) -> None:
    line.serving("w1")
    [flight] = board(line, "a")
    die(line, "w1", "w2")
    charges = line.dispatcher.failover.suspects.charges
    for _ in range(3):
        line.clock.now += SILENT_S + 1
        line.dispatcher.sweep()
        assert charges(flight) == 1
        line.beat("w2")
        assert charges(flight) == 0
    assert flight.terminal is None
    assert flight.leg is not None


def test_after_a_death_under_proven_flights_only_all_are_suspects_again(line: Line) -> None:
    line.serving("w1")
    flights = board(line, "a", "b")
    die(line, "w1", "w2")
    line.say("w2", events("w2", "a~2", *TEXTS))
    line.say("w2", events("w2", "b~2", *TEXTS))
    assert [flight.suspect for flight in flights] == [False, False]
    assert die(line, "w2", "w3") == ["a~3"]
    assert [flight.suspect for flight in flights] == [True, True]


def test_nobody_is_suspected_when_a_worker_says_goodbye(line: Line) -> None:
    line.serving("w1")
    board(line, "a", "b")
    line.dispatcher.hear("w1", Goodbye(incarnation="w1", reason="asked to stop"))
    assert die(line, "nobody", "w2") == ["a~2", "b~2"]


def test_the_charges_against_requests_are_bounded(line: Line) -> None:
    suspects = line.dispatcher.failover.suspects
    line.serving("w", rows=10)
    [flight] = board(line, "a")
    flight.suspect = True
    for number in range(2 * REMEMBERED_MAX):
        flight.fingerprint = b"%d" % number
        assert suspects.died([flight]) == flight.fingerprint
    assert suspects.charges(flight) == 1
    assert len(suspects._charges) == REMEMBERED_MAX


def test_a_fingerprint_is_of_what_is_asked_and_not_of_who_asks() -> None:
    one = distinct("a")
    same = replace(one, id="b", incarnation="g2", resume=[1], sampling=replace(one.sampling, seed=9))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(replace(one, sampling=replace(one.sampling, logit_bias={7: 1.0, 3: 2.0})))
    assert fingerprint(replace(one, template_kwargs={"n": 2**70})) == b""  # cannot be sent either
    for other in (
        replace(one, prompt="b"),
        replace(one, max_tokens=3),
        replace(one, sampling=replace(one.sampling, temperature=1.0)),
    ):
        assert fingerprint(other) != fingerprint(one)


# --- what the line has lost --------------------------------------------------------------------------


def cancel(id: str) -> Cancel:
    return Cancel(incarnation=GATEWAY, id=id)


def test_a_double_is_dropped_and_counted(line: Line) -> None:
    line.serving("w")
    [flight] = board(line, "a")
    line.say("w", events("w", "a", "x"), events("w", "a", "x"), events("w", "a", "y", first=1))
    assert text_of(flight) == "xy"
    assert line.dispatcher.dropped == {"double": 1}


@pytest.mark.parametrize("gap", ["delta", "end"])
def test_behind_a_gap_the_answer_is_begun_again_where_the_client_is(gap: str, line: Line) -> None:
    line.serving("w")
    [flight] = board(line, "a")
    line.say("w", events("w", "a", "x"))
    line.sent_to("w")
    line.say("w", events("w", "a", "z", first=2) if gap == "delta" else finished("w", "a", tokens=3))
    assert line.sent_to("w") == [cancel("a"), replace(distinct("a"), id="a~2", resume=[0])]
    line.say("w", events("w", "a", "y", first=1), events("w", "a~2", "y", "z"), finished("w", "a~2", 3))
    assert text_of(flight) == "xyz"
    assert isinstance(flight.terminal, Finished)


def test_a_line_that_loses_something_every_time_fails_the_flight_in_the_end(line: Line) -> None:
    line.serving("w")
    [flight] = board(line, "a")
    for _ in range(MENDS_MAX):
        assert flight.leg is not None
        line.say("w", events("w", flight.leg.id, "z", first=1))
    assert flight.leg is not None
    line.say("w", events("w", flight.leg.id, "x"))  # one token counts as progress
    for _ in range(MENDS_MAX + 1):
        assert flight.leg is not None
        line.say("w", events("w", flight.leg.id, "z", first=7))
    assert code_of(flight) == Code.INTERNAL_ERROR


def row(id: str) -> RowStatus:
    return RowStatus(id=id, phase="decode", prompt_tokens=3)


def beats(line: Line, count: int, *rows: str, running: int | None = None, steps: bool = True) -> None:
    """Heartbeats of a worker that holds these rows, a quarter of a second apart."""
    for _ in range(count):
        line.clock.now += 0.25
        line.steps += steps
        held = len(rows) if running is None else running
        line.beat("w", running=held, steps=line.steps, rows=[row(id) for id in rows])


LONG_ENOUGH = 4 + BEATS_MISSED_MAX


@pytest.mark.parametrize("was_accepted", [False, True])
def test_a_flight_that_its_worker_does_not_know_is_sent_again(was_accepted: bool, line: Line) -> None:
    line.serving("w")
    [_, flight] = board(line, "other", "a")
    if was_accepted:
        line.say("w", accepted("w", "a"), events("w", "a", "x"))
    line.sent_to("w")
    beats(line, LONG_ENOUGH - 2, "other")
    assert line.sent_to("w") == []
    beats(line, 2, "other")
    resume = [0] if was_accepted else []
    assert line.sent_to("w") == [cancel("a"), replace(distinct("a"), id="a~2", resume=resume)]
    assert flight.terminal is None
    assert line.dispatcher.dropped == {"lost": 1}


def test_an_idle_worker_has_lost_whatever_it_was_sent(line: Line) -> None:
    line.serving("w")
    board(line, "a")
    line.sent_to("w")
    beats(line, LONG_ENOUGH, steps=False)
    assert line.legs_sent_to("w") == ["a~2"]


@pytest.mark.parametrize("why", ["known", "young", "stuck", "preparing", "returns"])
def test_a_flight_that_may_be_there_yet_is_left_in_peace(why: str, line: Line) -> None:
    line.serving("w")
    board(line, "other", "a")
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
                beats(line, BEATS_MISSED_MAX - 1, "other")
                beats(line, 1, "other", "a")
    assert line.sent_to("w") == []


def test_a_row_that_no_flight_knows_is_cancelled_when_two_beats_have_named_it(line: Line) -> None:
    line.serving("w")
    board(line, "a")
    line.sent_to("w")
    beats(line, 1, "a", "stray")
    assert line.sent_to("w") == []
    beats(line, 1, "a", "stray")
    assert line.sent_to("w") == [cancel("stray")]
    beats(line, 1, "a")
    assert line.sent_to("w") == []


# --- any poison among any innocents ------------------------------------------------------------------


class Works:
    """A worker that makes a token of every row in each step and dies over the poisoned one's fatal token.

    What it said in its last `tail` steps is lost with it.
    """

    def __init__(self, line: Line, fatal: int, tail: int, tokens: int) -> None:
        self.line, self.fatal, self.tail, self.tokens = line, fatal, tail, tokens
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self.name = f"w{self.deaths}"
        self.rows: dict[str, list[int]] = {}
        self.unsaid: list[list[Delta]] = []
        self.line.serving(self.name, rows=64)

    def step(self, pulled: bool = False) -> None:
        for message in self.line.sent_to(self.name):
            if isinstance(message, Generate):
                self.rows[message.id] = [len(message.resume), 0]
            elif isinstance(message, Cancel):
                self.rows.pop(message.id, None)
        poisoned = [at for id, (at, _) in self.rows.items() if id.startswith("poison")]
        if pulled or self.fatal in poisoned:
            self.deaths += 1
            self.line.dispatcher.lost(self.name)
            self._start()
            return
        said = []
        for id, row in self.rows.items():
            if row[0] < self.tokens:
                said.append(Delta(id=id, sequence=row[1], tokens=[row[0]], text=f"{row[0]} "))
                row[0], row[1] = row[0] + 1, row[1] + 1
        self.unsaid.append(said)
        if len(self.unsaid) > self.tail or not said:
            self._say()

    def _say(self) -> None:
        for deltas in self.unsaid[: max(1, len(self.unsaid) - self.tail)]:
            self.line.say(self.name, replace(events(self.name, "x"), deltas=deltas))
        del self.unsaid[: max(1, len(self.unsaid) - self.tail)]
        if not any(self.unsaid):
            for id in [id for id, row in self.rows.items() if row[0] == self.tokens]:
                del self.rows[id]
                self.line.say(self.name, finished(self.name, id, self.tokens))


TOKENS = 9


@given(
    before=st.integers(0, 8),
    after=st.integers(0, 8),
    fatal=st.integers(0, TOKENS - 1),
    tail=st.integers(0, PROVEN_DELTAS - 1),
    copies=st.integers(1, 3),
    start=st.integers(0, 6),
)
def test_poison_costs_three_deaths_at_most_and_no_innocent_anything(
    before: int, after: int, fatal: int, tail: int, copies: int, start: int
) -> None:
    line = Line(waiting_max=64)
    works = Works(line, fatal, tail, TOKENS)
    innocents = board(line, *(f"i{number}" for number in range(before)))
    for _ in range(start):
        works.step()
    poison = [line.board(replace(request(f"poison{n}"), prompt="poison")) for n in range(copies)]
    innocents += board(line, *(f"i{number}" for number in range(before, before + after)))
    for _ in range(60 * (2 + len(innocents))):
        works.step()
    assert [code_of(flight) for flight in poison] == [Code.WORKER_CRASHED] * copies
    assert works.deaths <= 3
    for flight in innocents:
        assert isinstance(flight.terminal, Finished)
        assert text_of(flight) == "".join(f"{number} " for number in range(TOKENS))


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 6), st.integers(0, 2))
def test_who_is_unlucky_twice_without_having_been_alone_both_times_survives(
    instants: list[int], count: int, tail: int
) -> None:
    """The plug is pulled at any instants, at most once in the time that those aboard need to get through."""
    line = Line(waiting_max=64)
    works = Works(line, -1, tail, TOKENS)
    flights = board(line, *(f"i{number}" for number in range(count)))
    through = count * (PROVEN_DELTAS + tail + 2)
    for instant in instants:
        for _ in range(through + instant):
            works.step()
        works.step(pulled=True)
    for _ in range(60 * (2 + count)):
        works.step()
    assert [text_of(flight) for flight in flights] == ["".join(f"{n} " for n in range(TOKENS))] * count
