"""Flights that are restored from checkpoints in a new gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.dispatch import dispatcher as dispatcher_module
from broker.dispatch.checkpoint import (
    ADOPTION_S_MAX,
    RESTORED_TOO_OFTEN,
    RESTORES_MAX,
    AttemptRecord,
    Checkpoint,
)
from broker.dispatch.failover import CRASHES_MAX
from broker.dispatch.flight import Flight, Item
from protocol.errors import Code
from protocol.messages import (
    PROTOCOL_VERSION,
    Adopt,
    Cancel,
    EmbeddingChunk,
    Failed,
    Finished,
    Generate,
    Hello,
    Welcome,
)
from protocol.types import AdoptedRow, Delta, OrphanedRow, Sampling
from tests.broker.dispatcher_line import FAILOVER_S, Line, code_of, ready, refusal, text_of
from tests.broker.peers import ROWS, TOKENS, Peer, SimulatedLine, text_at
from tests.factories import accepted, delta, embed, encoded, events, finished, request, reused

NEXT = "next-gateway"


def stored(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as it is read back from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint), type=Checkpoint)


def restore(
    line: Line, *checkpoints: Checkpoint, output: Sequence[Item] = (), elapsed_s: float = 3.0
) -> list[Flight]:
    context = line.dispatcher.restore([(stored(each), output) for each in checkpoints], (), elapsed_s)
    line.contexts.append(context)
    return context.__enter__()


def begun(line: Line, id: str = "a") -> tuple[Flight, list[Item]]:
    """Return a flight with two tokens, and its output."""
    line.serving("w1")
    flight = line.submit(request(id, prompt=id, sampling=Sampling(seed=77), deadline_s=60.0))
    line.say("w1", accepted("w1", id), reused("w1", id, 2), events("w1", id, "al", "l"))
    return flight, flight.take()


def restarted() -> tuple[Line, Flight]:
    """Return a gateway with a flight that the one before it had begun."""
    line, after = Line(), Line(incarnation=NEXT)
    flight, output = begun(line)
    [flight] = restore(after, line.dispatcher.checkpoint(flight), output=output)
    return after, flight


def test_a_restored_flight_goes_on_at_its_next_token_with_the_same_seed() -> None:
    line, after = Line(), Line(incarnation=NEXT)
    line.clock.now += 7
    flight, output = begun(line)
    line.clock.now += 7
    [again] = restore(after, line.dispatcher.checkpoint(flight), output=output)
    after.serving("w2")
    assert after.attempts_sent_to("w2") == []  # the worker that was running it may come
    after.clock.now += ADOPTION_S_MAX
    after.dispatcher.sweep()
    [sent] = after.generates("w2")
    assert isinstance(flight.request, Generate)
    assert sent == replace(
        flight.request, id="a~2.next-gat", incarnation=NEXT, resume=[0, 1], deadline_s=47.0
    )
    after.say("w2", accepted("w2", sent.id), reused("w2", sent.id, 4), events("w2", sent.id, " aboard"))
    after.say("w2", finished("w2", sent.id, 3, cached=4))
    delta, end = again.take()
    assert isinstance(delta, Delta)
    assert delta.text == " aboard"
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 2
    assert again.key == flight.key


def test_vectors_that_were_answered_are_not_computed_again() -> None:
    line = Line(incarnation=NEXT)
    checkpoint = Checkpoint(request=embed(["a", "b", "c"]), model="m")
    [flight] = restore(line, checkpoint, output=[accepted(), encoded(0, [1], bytes(8))])
    line.serving("w1")
    [sent] = line.sent_to("w1")[1:]
    assert getattr(sent, "answered", None) == [1]
    line.say("w1", accepted("w1", sent.id), encoded(0, [0, 2], bytes(16), "w1", sent.id))
    line.say("w1", finished("w1", sent.id))
    assert [type(item) for item in flight.take()] == [EmbeddingChunk, Finished]


def test_a_full_server_does_not_refuse_what_it_had_admitted() -> None:
    line = Line(waiting_max=0)
    line.serving("w1", rows=1)
    line.submit(request("a"))
    assert "capacity" in refusal(line.submit, request("b")).message
    checkpoint = Checkpoint(request=request("b"), model="m")
    [flight] = restore(line, checkpoint)
    assert flight.terminal is None
    with pytest.raises(ValueError, match="already open"):
        restore(line, checkpoint)


def test_more_flights_than_a_gateway_holds_are_left_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "RESTORED_FLIGHTS_MAX", 2)
    line = Line(incarnation=NEXT)
    line.serving("w1")
    a, b, c = (Checkpoint(request=request(id), model="m") for id in "abc")
    with line.dispatcher.restore([(a, []), (b, [])], [b"image"], 0.0):
        assert line.media["a~1.next-gat"] == [b"image"]
        assert refusal(restore, line, c).code is Code.TEXT_GENERATION_BUSY
        assert len(line.dispatcher.flights) == 2
        line.sent.clear()
    # Their clients have left.
    ids = [message.id for _, message in line.sent if isinstance(message, Cancel)]
    assert ids == ["a~1.next-gat", "b~1.next-gat"]
    assert len(line.dispatcher.flights) == 0
    line.dispatcher.fail_all()
    assert refusal(restore, line, a).code is Code.SHUTTING_DOWN


def test_a_restored_flight_has_the_time_that_its_model_needs_to_load() -> None:
    after, flight = restarted()
    after.clock.now += FAILOVER_S + 1
    after.dispatcher.sweep()
    assert flight.terminal is None
    after.clock.now += 300
    after.dispatcher.sweep()
    assert code_of(flight) == Code.MODEL_LOADING


# --- requests that crash ------------------------------------------------------------------------------


def test_a_request_that_ends_every_gateway_fails_in_the_end() -> None:
    checkpoint, output = Checkpoint(request=request("a"), model="m"), [accepted(), delta()]
    for _ in range(RESTORES_MAX):
        line = Line()
        [flight] = restore(line, checkpoint, output=output)
        assert flight.terminal is None
        checkpoint = line.dispatcher.checkpoint(flight)
    line = Line()
    [flight] = restore(line, checkpoint, output=output)
    assert isinstance(flight.terminal, Failed)
    assert flight.terminal.message == RESTORED_TOO_OFTEN
    line.serving("w1")
    assert line.attempts_sent_to("w1") == []
    [flight] = restore(Line(), checkpoint, output=[*output, delta(sequence=1)])
    assert flight.terminal is None


def test_crashes_count_across_gateways() -> None:
    line = Line()
    line.serving("w0")
    flight = line.submit(request("p"))
    for number in range(CRASHES_MAX - 1):
        line.serving(f"w{number}")
        line.dispatcher.lost(f"w{number}")
    after = Line(incarnation=NEXT, clock=line.clock)
    [again] = restore(after, line.dispatcher.checkpoint(flight), elapsed_s=0.0)
    after.serving("v")
    assert after.attempts_sent_to("v") != []
    after.dispatcher.lost("v")
    assert code_of(again) == Code.WORKER_CRASHED


# --- adoption ---------------------------------------------------------------------------------------------


def greet(line: Line, worker: str, *rows: OrphanedRow) -> list[AdoptedRow] | None:
    """Connect a worker with its rows. Return those adopted; None if it got no reply about them."""
    line.say(worker, Hello(incarnation=worker, version=PROTOCOL_VERSION, model="m", pid=1, rows=list(rows)))
    line.say(worker, ready(worker))
    replies = [message for message in line.sent_to(worker) if isinstance(message, Adopt)]
    assert len(replies) <= 1
    return replies[0].rows if replies else None


def test_a_row_is_adopted_where_the_checkpoint_ends() -> None:
    after, flight = restarted()
    rows = [OrphanedRow(id="a", deltas=4, first=1), OrphanedRow(id="stray", whole=True)]
    assert greet(after, "w1", *rows) == [AdoptedRow(id="a", deltas=2, accepted=True, reused=True)]
    after.say("w1", events("w1", "a", " aboard", "!", first=2), finished("w1", "a", 4))
    assert text_of(flight) == " aboard!"
    assert isinstance(flight.terminal, Finished)
    # One that cannot send its acceptance again is adopted only if the gateway has that.
    checkpoint = Checkpoint(request=request("a"), model="m", attempt=AttemptRecord(id="a", worker="w1"))
    for output in ([], [accepted("w1", "a")]):
        after = Line(incarnation=NEXT)
        restore(after, checkpoint, output=output)
        assert bool(greet(after, "w1", OrphanedRow(id="a", deltas=3, first=0))) is bool(output)


@pytest.mark.parametrize(
    "row",
    [
        OrphanedRow(id="a", deltas=9, first=3),
        OrphanedRow(id="a", deltas=1, whole=True),
        OrphanedRow(id="another", deltas=9, whole=True),
        None,  # as a worker of an earlier version
    ],
)
def test_a_row_that_cannot_send_what_is_missing_is_resumed_by_its_tokens(row: OrphanedRow | None) -> None:
    after, _ = restarted()
    rows = [row] if row else []
    after.say("w1", Hello(incarnation="w1", version=PROTOCOL_VERSION, model="m", pid=1, rows=rows))
    after.say("w1", ready("w1"))
    welcome, *adopt, sent = after.sent_to("w1")
    assert isinstance(welcome, Welcome)
    assert welcome.orphan_s == 60
    assert adopt == ([Adopt(incarnation=NEXT, rows=[])] if rows else [])
    assert isinstance(sent, Generate)
    assert sent.id == "a~2.next-gat"
    assert sent.resume == [0, 1]


def test_a_reply_that_cannot_be_sent_adopts_nothing() -> None:
    after, flight = restarted()
    after.unreachable.add("w1")
    greet(after, "w1", OrphanedRow(id="a", deltas=2, whole=True))
    assert flight.attempt is None
    after.unreachable.clear()
    after.dispatcher.sweep()
    assert after.attempts_sent_to("w1") == ["a~3.next-gat"]


def test_a_worker_that_loses_its_connection_goes_on_with_its_rows_unless_they_went_elsewhere() -> None:
    row = OrphanedRow(id="a", deltas=3, whole=True)
    line = Line()
    flight, _ = begun(line)
    line.dispatcher.lost("w1")
    line.sent.clear()
    assert greet(line, "w1", row) == [AdoptedRow(id="a", deltas=2, accepted=True, reused=True)]
    assert line.attempts_sent_to("w1") == []
    assert flight.crash_count == 0
    line.say("w1", events("w1", "a", "!", first=2), finished("w1", "a", 3))
    assert isinstance(flight.terminal, Finished)
    line = Line()
    begun(line)
    line.serving("w2")
    line.dispatcher.lost("w1")
    assert greet(line, "w1", row) == []


# --- a history of gateways ----------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    """An answer in the journal: its items and latest checkpoint."""

    flight: Flight
    checkpoint: Checkpoint
    items: list[Item] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Delta))

    @property
    def has_ended(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1], Finished | Failed)


class History:
    """Gateways that die one after another, one worker at a time, and a journal that may be behind."""

    def __init__(self, answers: int, *, keeps_rows: bool) -> None:
        """`keeps_rows`: workers keep their rows when they lose their gateway."""
        self.keeps_rows = keeps_rows
        self.gateways = self.workers = 0
        self.peers: dict[str, Peer] = {}
        self.line = SimulatedLine(self.peers, incarnation="gateway0")
        self.contexts = ExitStack()
        self.new_worker()
        dispatcher = self.line.dispatcher
        self.answers = []
        for number in range(answers):
            asked = request(f"r{number}", prompt=f"r{number}")
            [flight] = self.contexts.enter_context(dispatcher.submit(dispatcher.find("m"), [asked], ()))
            self.answers.append(Answer(flight, dispatcher.checkpoint(flight)))

    @property
    def worker(self) -> Peer:
        return self.peers[f"w{self.workers}"]

    def new_worker(self) -> None:
        self.workers += 1
        name = f"w{self.workers}"
        self.peers[name] = Peer(name, "m", loaded=True)
        self.greet()

    def greet(self) -> None:
        self.worker.reconnect(keeps=self.keeps_rows)
        self.deliver()

    def deliver(self) -> None:
        while self.worker.line:
            self.line.dispatcher.on_message(self.worker.name, self.worker.line.popleft())

    def journal(self) -> None:
        for answer in self.answers:
            if not answer.has_ended:
                answer.items += answer.flight.take()
                answer.checkpoint = stored(self.line.dispatcher.checkpoint(answer.flight))

    def work(self) -> None:
        self.worker.work()

    def worker_dies(self) -> None:
        self.worker.alive, self.worker.noticed = False, True
        self.line.dispatcher.lost(self.worker.name)
        self.line.clock.now += 2
        self.new_worker()
        self.line.dispatcher.sweep()

    def gateway_dies(self) -> None:
        self.gateways += 1
        clock = self.line.clock
        clock.now += 3
        self.worker.line.clear()
        self.line = SimulatedLine(self.peers, incarnation=f"gateway{self.gateways}", clock=clock)
        self.contexts = ExitStack()
        for answer in self.answers:
            if not answer.has_ended:
                restored = self.line.dispatcher.restore([(answer.checkpoint, answer.items)], (), 3.0)
                [answer.flight] = self.contexts.enter_context(restored)
        self.greet()

    def settle(self) -> None:
        for _ in range(40):
            self.line.clock.now += 1
            self.line.dispatcher.sweep()
            self.worker.work()
            self.worker.line.append(self.worker.heartbeat())
            self.deliver()
            self.journal()


BEGINNING = (History.work, History.deliver, History.journal)
EVENTS = (*BEGINNING, History.work, History.gateway_dies, History.worker_dies)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, ROWS), st.lists(st.sampled_from(EVENTS), max_size=30), st.booleans())
def test_every_answer_ends_with_its_text_whoever_dies_and_when(
    answers: int, happens: Sequence[Callable[[History], None]], keeps_rows: bool
) -> None:
    history = History(answers, keeps_rows=keeps_rows)
    if keeps_rows:
        happens = [*BEGINNING, *happens]
    for event in happens:
        event(history)
    history.settle()
    gateways, workers = happens.count(History.gateway_dies), happens.count(History.worker_dies)
    for answer in history.answers:
        assert answer.has_ended
        end = answer.items[-1]
        assert isinstance(end, Finished) or gateways > RESTORES_MAX or workers > 1
        if isinstance(end, Finished):
            assert answer.text == "".join(text_at(answer.flight.id, n) for n in range(TOKENS))
            assert end.usage.completion_tokens == TOKENS
    history.contexts.close()
    assert len(history.line.dispatcher.flights) == 0
    if keeps_rows and gateways <= RESTORES_MAX and not workers:
        assert set(history.worker.computed.values()) == {1}, "a token was computed twice"
