"""What a worker can send again to the next gateway."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Accepted, EmbeddingChunk, Finished, Message, PrefixHit, StepOutputs
from protocol.types import AdoptedRow, Delta, OrphanedRow, TokenLogprob
from tests import factories
from worker.gateway.replay import REPLAY_BYTES_MAX, REPLAY_MESSAGES_MAX, Replay


def step(sequences: dict[str, int]) -> StepOutputs:
    deltas = [factories.delta("word ", id, sequence=at, tokens=[at]) for id, at in sequences.items()]
    return StepOutputs(incarnation="w", deltas=deltas)


def missing(replay: Replay, *rows: AdoptedRow) -> list[Message]:
    return list(replay.missing({row.id: row for row in rows}))


def full(messages_max: int = REPLAY_MESSAGES_MAX, bytes_max: int = REPLAY_BYTES_MAX) -> Replay:
    """Return the replay of two requests, of which the first has ended after three deltas."""
    replay = Replay(bytes_max, messages_max)
    for id in ("a", "b"):
        replay.open(id)
        replay.note(factories.accepted("w", id), 0.0)
        replay.note(factories.reused("w", id), 0.0)
    for at in range(3):
        replay.note(step({"a": at, "b": at}), float(at))
    replay.note(factories.finished("w", "a", 3), 3.0)
    replay.note(step({"b": 3}), 4.0)
    return replay


def test_a_gateway_that_knows_nothing_gets_everything_in_order() -> None:
    replay = full()
    assert replay.rows() == [
        OrphanedRow(id="a", deltas=3, whole=True),
        OrphanedRow(id="b", deltas=4, whole=True),
    ]
    sent = missing(replay, AdoptedRow(id="a"))
    assert [type(message) for message in sent] == [Accepted, PrefixHit, *[StepOutputs] * 3, Finished]
    assert all(len(message.deltas) == 1 for message in sent if isinstance(message, StepOutputs))


def test_a_gateway_gets_only_what_it_lacks() -> None:
    rows = [AdoptedRow(id=id, deltas=2, accepted=True, reused=True) for id in "ab"]
    first, end, last = missing(full(), *rows)
    assert first == step({"a": 2, "b": 2})
    assert isinstance(end, Finished)
    assert last == step({"b": 3})


def test_old_messages_are_dropped_and_a_row_says_from_where_it_is_known() -> None:
    replay = full()
    replay.trim(2.0)
    assert replay.rows() == [OrphanedRow(id="a", deltas=3, first=2), OrphanedRow(id="b", deltas=4, first=2)]
    replay.trim(4.0)
    assert replay.rows() == [OrphanedRow(id="b", deltas=4, first=3)]
    replay.trim(9.0)
    assert replay.rows() == [OrphanedRow(id="b", deltas=4, first=4)]
    assert len(replay) == 0
    replay.forget("b")
    assert replay.rows() == []


def test_vectors_and_prompt_logprobs_are_kept_too() -> None:
    replay = Replay()
    replay.open("a")
    for at in range(3):
        replay.note(factories.encoded(at, [at], bytes(8), "w"), 0.0)
    assert replay.rows() == [OrphanedRow(id="a", deltas=3, whole=True)]
    [chunk] = missing(replay, AdoptedRow(id="a", deltas=2))
    assert isinstance(chunk, EmbeddingChunk)
    assert chunk.sequence == 2


def test_large_messages_are_bounded_by_their_bytes() -> None:
    likely = TokenLogprob(bytes=b"x", logprob=-1.0, top=[(b"y", -2.0)] * 20)
    replay = Replay(bytes_max=100_000)
    replay.open("a")
    for at in range(100):
        delta = Delta(id="a", sequence=at, tokens=[1], likelihoods=[likely])
        replay.note(StepOutputs(incarnation="w", deltas=[delta]), 0.0)
    assert 20 < len(replay) < 40
    assert replay.rows() == [OrphanedRow(id="a", deltas=100, first=100 - len(replay))]


@given(
    st.lists(st.sets(st.sampled_from("abc"), min_size=1), max_size=30),
    st.integers(1, 30),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_offers_are_without_a_gap(steps: list[set[str]], messages_max: int, trimmed: int, known: int) -> None:
    replay, made = Replay(messages_max=messages_max), dict.fromkeys("abc", 0)
    for id in made:
        replay.open(id)
    for now, ids in enumerate(steps):
        replay.note(step({id: made[id] for id in sorted(ids)}), float(now))
        for id in ids:
            made[id] += 1
    replay.trim(float(trimmed))
    assert len(replay) <= messages_max
    for row in replay.rows():
        assert row.deltas == made[row.id]
        assert row.whole is (row.first == 0)
        at = max(row.first, min(known, row.deltas))
        sent = missing(replay, AdoptedRow(id=row.id, deltas=at))
        found = [delta.sequence for each in sent if isinstance(each, StepOutputs) for delta in each.deltas]
        assert found == list(range(at, row.deltas))
