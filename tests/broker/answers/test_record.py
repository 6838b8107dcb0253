"""Collected output: whatever is taken from the collector is what was put into it, in order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.answers import record
from broker.answers.record import AnswerRecord, DeltaRun, Piece, PieceCollector
from broker.dialects.rendering import ChatRendering
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.flight import Item
from protocol.messages import Finished
from protocol.types import CallDelta, Delta, TokenLogprob
from tests.factories import accepted, failed, finished, request, reused

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
    head = AnswerRecord(
        owner=b"",
        rendering=ChatRendering(id="x", model="m", created=1),
        checkpoints=[Checkpoint(request=request(), model="m")],
        at=0.0,
    )
    return record.decode(record.encode(head), pieces)[1]


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


def test_that_the_gateway_shut_down_is_not_kept() -> None:
    collector = PieceCollector()
    collector.add(0, [accepted(), reused()], 1.0)
    collector.add(0, [failed("w", "a", "shutting_down")], 2.0)
    collector.add(1, [finished("w", "b", 1)], 3.0)
    pieces = read(collector.take())
    assert [(piece.choice, type(piece.end)) for piece in pieces] == [(0, type(None)), (1, Finished)]


def test_a_run_that_does_not_fit_together_or_is_unknown_is_refused() -> None:
    class EarlierPiece(msgspec.Struct, kw_only=True):
        at: float
        deltas: list[Delta] = []

    run = DeltaRun(id="a", sequence=0, tokens=[1, 2], texts=["x", "y"], counts=[1])
    with pytest.raises(ValueError, match="zip"):
        _ = Piece(at=0.0, deltas=run).items
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Piece(at=0.0, deltas=run)), type=EarlierPiece)
