"""Rows with quantized KV caches: what is stored and reused of them, and the memory that they reserve.

The scripted engine records every token that is run on the wrong side of a row's switch, every quantized
column that is stored as an exact one, and every row that is quantized elsewhere.
"""

from __future__ import annotations

import pytest

from tests.factories import engine_request
from tests.worker.engines import END, House, ScriptedEngine, breaking
from tests.worker.schedule.test_prefix_store import PLENTY, cached, tokens
from worker.contract.engine import CacheSpec
from worker.contract.kv_quantization import NEVER, KVQuantization
from worker.schedule.memory_reservations import QuantizedRows, Reservations
from worker.schedule.scheduler import Scheduler, SchedulerConfig

SHAPES = {"dense": CacheSpec(), "hybrid": CacheSpec(has_states=True)}
KV = KVQuantization(8, 64, start=0, step=600)
SHAPED = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def house_of(shape: CacheSpec, kv: KVQuantization = KV, **options: int) -> House:
    engine = ScriptedEngine(shape=shape, kv_quantization=kv)
    return House(rows_max=16, prefill_tokens=256, engine=engine, store_bytes=PLENTY, **options)


@SHAPED
@pytest.mark.parametrize(
    ("start", "step", "prompt", "stored"),
    [
        (0, 600, 700, 704),  # both prompts are quantized at 600 tokens, so what follows is computed alike
        (0, 600, 500, 499),  # the answer is computed on quantized keys, and the next prompt on exact ones
        (502, 502, 500, 504),  # every prompt is quantized there
        (502, 600, 500, 502),
    ],
    ids=["long prompt", "short prompt", "same switch", "other switch"],
)
def test_the_next_turn_begins_where_it_is_computed_otherwise(
    shape: CacheSpec, start: int, step: int, prompt: int, stored: int
) -> None:
    house = house_of(shape, KVQuantization(8, 64, start, step))
    house.submit("first", 5, 6, 7, tokens=tokens(1, prompt))
    house.run()
    house.submit("second", 8, tokens=(*tokens(1, prompt), 5, 6, 7, END, *tokens(2, 40)))
    house.run()
    assert house.text("second") == "<8>"
    assert cached(house, "second") == stored


@SHAPED
def test_a_resumed_answer_is_restored_up_to_its_own_switch(shape: CacheSpec) -> None:
    """The same tokens as one prompt were computed exactly up to 600."""
    house = house_of(shape, KVQuantization(8, 64, start=502, step=600))
    whole = tokens(1, 700)
    house.submit("long", 5, tokens=whole)
    house.run()
    house.submit("resumed", *whole[300:], 6, tokens=whole[:300], resume=whole[300:650], max_tokens=999)
    house.run()
    assert house.engine.restored.get("resumed", 0) == (0 if shape.has_states else 502)
    assert house.tokens("resumed")[-2:] == [6, END]


def test_a_row_that_cannot_be_quantized_fails_alone() -> None:
    house = house_of(SHAPES["dense"])
    house.engine.at["quantize", 0] = breaking("scripted")
    house.submit("first", 5, tokens=tokens(1, 700))
    house.submit("second", 6, tokens=tokens(2, 700))
    house.run()
    assert sorted(house.failed(id) for id in ("first", "second")) == [False, True]


def test_a_new_row_reserves_what_it_takes_at_its_switch_or_in_the_end() -> None:
    def reservations(bytes_max: int) -> Reservations:
        quantized = QuantizedRows(KV, lambda length: length)
        return Reservations(bytes_max, lambda length: 4 * length, quantized=quantized)

    ledger = reservations(PLENTY)
    assert ledger.needs(100, 99) == 4 * 128
    assert ledger.needs(1000, 600) == 4 * 640
    assert ledger.needs(6000, 600) == 6016
    assert ledger.needs(6000, NEVER) == 4 * 6016
    lengths = [ledger.needs(length) for length in range(0, 6000, 50)]
    assert lengths == sorted(lengths)
    # The longest row is the longest that fits quantized.
    assert reservations(4 * 640).tokens_max(10_000) == 2559
    assert reservations(4 * 600).tokens_max(10_000) == 575


def test_a_row_gives_back_what_it_no_longer_needs() -> None:
    kv = QuantizedRows(KV, lambda length: length)
    policy = SchedulerConfig(4, bytes_max=10**5, row_bytes=lambda length: 4 * length, quantized=kv)
    scheduler = Scheduler(policy)
    row = scheduler.add(engine_request("r", tokens(1, 1000)), 0.0)
    scheduler.plan()
    assert (row.bytes, row.switch) == (4 * 640, 600)
    scheduler.quantized(row)
    assert row.bytes == 1024
