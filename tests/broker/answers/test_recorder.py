"""When a recorded answer is written to the journal, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.answers import record
from broker.answers.answer import COLLECTED_S_MAX, DISK_S_MAX, Scheduler
from broker.answers.answers import DurableAnswers
from broker.answers.open_flights import OpenFlights
from broker.answers.record import AnswerRecord, AnswerRecorder, DeltaRun, Piece, PieceCollector
from broker.api.rendering import ChatRendering
from broker.dispatch.checkpoint import Checkpoint, checkpoint_of, flight_of
from broker.dispatch.flight import Flight, Item
from broker.dispatch.flights import Flights
from broker.journal.file import Append, Operation, Put, Replace
from protocol.types import CallDelta, Delta, TokenLogprob
from tests.factories import accepted, failed, finished, request


def head(rendering: ChatRendering, at: float) -> AnswerRecord:
    checkpoints = [Checkpoint(request=request(), model="m")]
    return AnswerRecord(rendering=rendering, checkpoints=checkpoints, at=at)


@dataclass
class Recording:
    """A recorded answer of one flight, whose worker is played by the test. It is its own journal."""

    operations: list[Operation] = field(default_factory=list)
    now: float = 100.0
    due: list[Callable[[], object]] = field(default_factory=list)
    disk_fails: bool = False

    def __post_init__(self) -> None:
        self.flights = Flights()
        self.flight = self.flights.open(request(), "m", self.now)
        scheduler = Scheduler(lambda: self.now, self.due.append, lambda delay_s, call: None)
        self.answers = DurableAnswers(
            scheduler.clock, lambda: scheduler, give_up=lambda *given: None, window_s=60
        )
        self.answer = self.answers.new("owner", key="k", digest=b"d")
        self.dispatch("w")
        rendering = ChatRendering(id="x", model="m", created=1, stream=True)
        renderer = rendering.renderer(lambda: "fp")
        self.answer.open(OpenFlights(nullcontext([self.flight]), on_end=lambda *given: None), renderer)
        told = head(rendering, self.now)
        AnswerRecorder(self, self.answer, told, self._checkpoint, lambda: "fp", lambda: self.now).begin({})

    def _checkpoint(self, flight: Flight) -> Checkpoint:
        return checkpoint_of(flight, self.now)

    def add(self, operation: Operation, nbytes: int = 0) -> int:
        if self.disk_fails:
            return 0
        self.operations.append(operation)
        return len(self.operations)

    def dispatch(self, worker: str) -> None:
        """Dispatch the flight to a worker, which accepts it."""
        if self.flight.attempt is not None:
            self.flights.leave(self.flight, self.now)
        sent = self.flights.assign(self.flight, worker, self.now)
        self.flight.accept(accepted(worker, sent.id))

    def say(self, *texts: str) -> None:
        attempt = self.flight.attempt
        assert attempt is not None
        for text in texts:
            each = Delta(id=attempt.id, sequence=attempt.deltas, tokens=[1], text=text)
            self.flight.accept_delta(each, self.now)

    def settle(self) -> None:
        """Do what is due on the event loop."""
        while self.due:
            self.due.pop(0)()

    def pass_on(self, *texts: str) -> None:
        self.say(*texts)
        self.settle()

    def shape(self) -> list[str]:
        """Return the operations in short: texts of what was appended, and the others' names."""
        shown = []
        for operation in self.operations:
            match operation:
                case Append(_, item):
                    [piece] = record.decode(self._head(), [item])[1]
                    texts = [each.text for each in piece.items if isinstance(each, Delta)]
                    shown.append("".join(texts) if texts else "+")
                case Replace(_, None, True):
                    shown.append("end")
                case _:
                    shown.append(type(operation).__name__)
        return shown

    def _head(self) -> bytes:
        [put] = [operation for operation in self.operations if isinstance(operation, Put)]
        return put.head


def test_output_is_written_together_once_it_is_a_second_old() -> None:
    recording = Recording()
    for text in "abc":
        recording.pass_on(text)
        recording.answers.sweep()
    assert recording.shape() == ["Put"]
    recording.now += COLLECTED_S_MAX
    recording.answers.sweep()
    recording.answers.sweep()
    assert recording.shape() == ["Put", "a", "+", "bc"]


def test_what_is_left_is_written_before_the_end_and_before_the_journal_is_closed() -> None:
    recording, stopped = Recording(), Recording()
    for each in (recording, stopped):
        each.pass_on("a", "b")
    recording.flight.end(finished("w", "a", 2))
    recording.settle()
    assert "".join(recording.shape()[1:]).replace("+", "") == "abend"
    stopped.answers.flush()
    assert "".join(stopped.shape()[1:]).replace("+", "") == "ab"


def test_output_that_readers_wait_for_is_written_at_once_unless_the_disk_fails() -> None:
    recording = Recording()
    answer = recording.answer
    recording.answers.wait_for_disk(answer)
    for text in "ab":
        recording.pass_on(text)
    assert [shown for shown in recording.shape() if shown in "ab"] == ["a", "b"], "written at once"
    recording.disk_fails = True
    recording.pass_on("b")
    assert answer.visible == 0
    # Every attempt of the journal's thread is reported, also one that has written nothing.
    for _ in range(4):
        recording.now += DISK_S_MAX / 4
        recording.answers.on_committed()
        recording.answers.sweep()
    assert answer.visible == len(answer.chunks) > 0
    before = answer.visible
    recording.pass_on("c")
    assert answer.visible == len(answer.chunks) > before


def test_output_of_an_attempt_is_written_before_the_record_of_the_next_one() -> None:
    recording = Recording()
    recording.pass_on("a")
    recording.say("b")  # arrives in the same iteration of the event loop as the output of the next attempt
    recording.dispatch("other")
    recording.pass_on("c")
    recording.answers.flush()
    told = [shown for shown in recording.shape() if shown != "+"]
    assert told == ["Put", "a", "b", "Replace", "c"]
    pieces = [o.item for o in recording.operations if isinstance(o, Append)]
    replaced = [o.head for o in recording.operations if isinstance(o, Replace)]
    assert replaced[0] is not None
    last, read = record.decode(replaced[0], pieces)
    items = [item for piece in read for item in piece.items]
    restored = flight_of(last.checkpoints[0], items, (), recording.now, 0.0, "next")
    assert (restored.tokens, restored.former and restored.former.deltas) == ([1, 1, 1], 1)


def test_of_an_answer_that_failed_nothing_more_is_written() -> None:
    recording = Recording()
    recording.pass_on("a")
    recording.flight.end(failed("w", recording.flight.id, "engine_error"))
    recording.settle()
    recording.answers.flush()
    assert recording.shape() == ["Put", "Delete"]


# --- pieces ------------------------------------------------------------------------------------------

LIKELIHOODS = [TokenLogprob(bytes=b"x", logprob=-0.5)]
CALLS = [CallDelta(index=0, name="f", arguments="{")]

deltas = st.builds(
    Delta,
    id=st.sampled_from(["a", "a~1"]),
    sequence=st.just(0),
    tokens=st.one_of(st.just([7]), st.lists(st.integers(0, 2**31 - 1), max_size=3)),
    text=st.text(max_size=4),
    reasoning=st.one_of(st.just(""), st.text(max_size=4)),
    likelihoods=st.sampled_from([[], [], LIKELIHOODS]),
    calls=st.sampled_from([[], [], CALLS]),
)
steps = st.lists(st.tuples(st.integers(0, 1), st.lists(deltas, min_size=1, max_size=3), st.booleans()))


def read(pieces: list[bytes]) -> list[Piece]:
    encoded = record.encode(head(ChatRendering(id="x", model="m", created=1), 0.0))
    return record.decode(encoded, pieces)[1]


def numbered(choices: list[tuple[int, list[Delta], bool]]) -> list[tuple[int, list[Delta], bool]]:
    """Number the deltas of each choice and attempt from 0, as workers do."""
    counts: dict[tuple[int, str], int] = {}
    found = []
    for choice, batch, is_taken in choices:
        own = []
        for each in batch:
            number = counts.get((choice, each.id), 0)
            counts[choice, each.id] = number + 1
            own.append(msgspec.structs.replace(each, sequence=number))
        found.append((choice, own, is_taken))
    return found


@settings(max_examples=50)
@given(steps)
def test_pieces_have_the_output_of_all_choices_in_its_order(
    drawn: list[tuple[int, list[Delta], bool]],
) -> None:
    collector, pieces, told = PieceCollector(), list[bytes](), list[tuple[int, Item]]()
    for at, (choice, batch, is_taken) in enumerate(numbered(drawn), 1):
        items: list[Item] = [accepted(id=batch[0].id), *batch] if at == 1 else list(batch)
        collector.add(choice, items, float(at))
        told += [(choice, item) for item in items]
        if is_taken:
            pieces += collector.take()
    pieces += collector.take()
    assert [(piece.choice, item) for piece in read(pieces) for item in piece.items] == told
    assert not pieces or read(pieces)[-1].at == float(len(drawn))
    assert collector.take() == []


def test_deltas_in_a_row_are_one_piece_of_a_fourth_of_their_bytes() -> None:
    said = [Delta(id="chatcmpl-" + "0" * 24, sequence=n, tokens=[n], text="turntable ") for n in range(100)]
    collector = PieceCollector()
    for each in said:
        collector.add(0, [each], 1.0)
    [piece] = collector.take()
    assert read([piece])[0].items == said
    assert 4 * len(piece) < len(record.encode(Piece(at=1.0, deltas=said)))


def test_a_run_that_does_not_fit_together_or_is_unknown_is_refused() -> None:
    class EarlierPiece(msgspec.Struct, kw_only=True):
        at: float
        deltas: list[Delta] = []

    run = DeltaRun(id="a", sequence=0, tokens=[1, 2], texts=["x", "y"], counts=[1])
    with pytest.raises(ValueError, match="zip"):
        _ = Piece(at=0.0, deltas=run).items
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Piece(at=0.0, deltas=run)), type=EarlierPiece)
