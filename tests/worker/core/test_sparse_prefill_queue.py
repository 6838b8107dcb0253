"""Sparse prefill in the loop: prompts are scored chunk by chunk between the steps of other rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.types import SparsePrefill
from tests.factories import engine_request
from tests.worker.engines import END, House
from tests.worker.scorers import Weigher
from worker.core.commands import Submit
from worker.core.sparse_prefill import SparsePrefillQueue

LITTLE = SparsePrefill(keep=0.99, above=0)
"""Settings under which less than a chunk could be skipped: prompts are scored, but run in full."""


@dataclass
class Reader(Weigher):
    """An importance scorer that records its calls. `at`: actions by index of the chunk."""

    house: House
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def read(self, row: str, tokens: Sequence[int]) -> None:
        self.at.get(len(self.sizes), lambda: None)()
        super().read(row, tokens)
        self.sizes.append(len(tokens))
        self.house.engine.takes("prefill", len(tokens))

    def score_tokens(self, row: str, last: int) -> list[float] | None:
        self.asked.append(row)
        return [1.0] * self.length(row) if len(self.asked) % 4 == 0 else None


def reading() -> tuple[House, Reader]:
    """Return a loop and a scorer: 0.25 ms per scored token, after a step of 40 ms."""
    house = House(prefill_tokens=2048)
    reader = Reader(house)
    house.loop.sparse_prefill = SparsePrefillQueue(reader, is_able=True)

    def take(kind: str, size: int) -> None:
        house.now += 0.04 * bool(house.engine.decoding) + 0.00025 * size if kind == "prefill" else 0.0001

    house.engine.takes = take
    return house, reader


def submit(house: House, id: str, tokens: int) -> None:
    house.engine.prompts[id], house.engine.scripts[id] = tuple(range(1, tokens + 1)), (5,)
    asked = engine_request(id, house.engine.prompts[id], end_tokens=frozenset((END,)), sparse=LITTLE)
    house.inbox.put(Submit(asked))


def test_importance_scoring_delays_a_stream_no_longer_than_the_target() -> None:
    house, reader = reading()
    house.submit("stream", *range(1, 999), prompt=1, max_tokens=300)

    was_read = False

    def take(kind: str, size: int) -> None:
        # Without a read the step itself is waited for.
        nonlocal was_read
        waited, was_read = was_read, kind == "prefill"
        house.now += 0.01 + 0.00025 * size if was_read else 0.0001 if waited else 0.01

    house.engine.takes = take
    house.engine.at["step", 40] = lambda: submit(house, "long", 3000)
    read_at: list[float] = []
    house.publish_also = lambda: read_at.append(house.now)
    house.run()
    gaps = [after - before for before, after in itertools.pairwise(read_at)]
    assert sorted(gaps)[-3] < 0.1
    assert max(reader.sizes) >= 128, "scoring must make progress"


def test_a_prompt_is_read_however_many_others_are_run() -> None:
    house, reader = reading()
    house.submit("stream", *range(1, 999), prompt=1, max_tokens=200)
    house.engine.at["step", 4] = lambda: submit(house, "long", 3000)
    last: list[str] = ["stream"]

    def another() -> None:
        # Another prompt arrives whenever one has been run.
        if sum(reader.sizes) < 2999:
            last.append(f"other {len(last)}")
            house.submit(last[-1], 5, prompt=400)

    for number in range(1, 400):
        house.engine.at["prefill", number] = another
    house.engine.at["step", 3] = another
    run: list[int] = []
    reader.at = {chunk: lambda: run.append(len(house.engine.groups)) for chunk in range(99)}
    house.run()
    assert house.text("long") == "<5>"
    assert {after - before for before, after in itertools.pairwise(run)} <= {1, 2}, "they must alternate"


def test_a_prompt_that_is_given_up_is_read_no_further_than_the_chunk_that_runs() -> None:
    house, reader = reading()
    house.submit("stream", *range(1, 99), prompt=1, max_tokens=60)
    house.engine.at["step", 4] = lambda: submit(house, "long", 3000)
    reader.at = {3: lambda: house.drop("long")}
    house.run()
    assert len(reader.sizes) == 4
    assert reader.asked == []
    assert not house.loop.sparse_prefill.rows
    assert house.ends("long") == []
    assert len(house.tokens("stream")) == 60
