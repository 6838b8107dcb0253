"""Rows with quantized KV caches: what is stored and reused of them, and the memory that they reserve.

The scripted engine records every token that is run on the wrong side of a row's switch, every quantized
column that is stored as an exact one, and every row that is quantized elsewhere.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import PrefixHit
from tests.factories import engine_request
from tests.worker.engines import END, House, ScriptedEngine, breaking
from worker.contract.engine import CacheSpec
from worker.contract.kv_quantization import NEVER, KVQuantization
from worker.schedule.memory_reservations import QuantizedRows, Reservations
from worker.schedule.scheduler import Scheduler, SchedulerConfig

SHAPES = {"dense": CacheSpec(), "hybrid": CacheSpec(has_states=True)}
KV = KVQuantization(8, 64, start=0, step=600)
PLENTY = 10**9
SHAPED = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def house_of(shape: CacheSpec, kv: KVQuantization = KV, **options: int) -> House:
    engine = ScriptedEngine(shape=shape, kv_quantization=kv)
    return House(rows_max=16, prefill_tokens=256, engine=engine, store_bytes=PLENTY, **options)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 2**31) for _ in range(count))


def reused(house: House, id: str) -> int:
    [hit] = [message for message in house.published if isinstance(message, PrefixHit) and message.id == id]
    return hit.reuse.tokens


def next_turn(house: House, prompt: tuple[int, ...]) -> int:
    """Answer a prompt, and the conversation's next one; return what is reused for that."""
    house.submit("first", 5, 6, 7, tokens=prompt)
    house.run()
    house.submit("second", 8, tokens=(*prompt, 5, 6, 7, END, *tokens(2, 40)))
    house.run()
    assert house.text("second") == "<8>"
    return reused(house, "second")


@SHAPED
def test_the_next_turn_of_a_long_prompt_begins_behind_its_answer(shape: CacheSpec) -> None:
    """Both are quantized at 600 tokens, so the tokens behind were computed alike."""
    assert next_turn(house_of(shape), tokens(1, 700)) == 704


@SHAPED
def test_the_next_turn_of_a_short_prompt_begins_at_its_switch(shape: CacheSpec) -> None:
    """Its answer was computed on quantized keys, where the next prompt computes exact ones."""
    assert next_turn(house_of(shape), tokens(1, 500)) == 499


@SHAPED
def test_answers_that_reach_the_switch_are_reused_up_to_it(shape: CacheSpec) -> None:
    late = KVQuantization(8, 64, start=502, step=502)
    assert next_turn(house_of(shape, late), tokens(1, 500)) == 504  # every prompt is quantized there
    uneven = KVQuantization(8, 64, start=502, step=600)
    assert next_turn(house_of(shape, uneven), tokens(1, 500)) == 502


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


@SHAPED
def test_a_row_whose_prefill_failed_in_a_batch_runs_up_to_its_switch_again(shape: CacheSpec) -> None:
    house = house_of(shape, KVQuantization(8, 64, start=0, step=30))
    house.engine.at["prefill", 0] = breaking("scripted")
    for row in range(3):
        house.submit(f"{row}", 5, prompt=80 + row)
    house.run()
    assert [house.text(f"{row}") for row in range(3)] == ["<5>"] * 3


def test_a_row_that_cannot_be_quantized_fails_alone() -> None:
    house = house_of(SHAPES["dense"])
    house.engine.at["quantize", 0] = breaking("scripted")
    house.submit("first", 5, tokens=tokens(1, 700))
    house.submit("second", 6, tokens=tokens(2, 700))
    house.run()
    assert sorted(house.failed(id) for id in ("first", "second")) == [False, True]


@SHAPED
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), start=st.sampled_from([0, 7, 40, 64]), step=st.sampled_from([16, 64]))
def test_any_conversations_are_quantized_and_stored_right(
    shape: CacheSpec, seed: int, start: int, step: int
) -> None:
    rng = random.Random(seed)
    house = house_of(shape, KVQuantization(8, 64, start, step), bytes_max=rng.choice((300, 10**6)))
    known: list[tuple[int, ...]] = [()]
    for turn in range(4):
        for row in range(rng.randint(1, 3)):
            begun = rng.choice(known)
            prompt = (*begun[: rng.choice((len(begun), rng.randint(0, len(begun))))], *tokens(turn, 20))[:120]
            script = tokens(row, rng.randint(0, 60))
            resume = script[: rng.randint(0, len(script))] if rng.random() < 0.3 else ()
            house.submit(f"{turn} {row}", *script, tokens=prompt, resume=resume)
            known.append((*prompt, *script))
        house.run()


# --- memory ---


def reservations(bytes_max: int = PLENTY) -> Reservations:
    return Reservations(
        bytes_max, lambda length: 4 * length, quantized=QuantizedRows(KV, lambda length: length)
    )


def test_a_new_row_reserves_what_it_takes_at_its_switch_or_in_the_end() -> None:
    ledger = reservations()
    assert ledger.needs(100, 99) == 4 * 128
    assert ledger.needs(1000, 600) == 4 * 640
    assert ledger.needs(6000, 600) == 6016
    assert ledger.needs(6000, NEVER) == 4 * 6016
    lengths = [ledger.needs(length) for length in range(0, 6000, 50)]
    assert lengths == sorted(lengths)


def test_the_longest_row_is_the_longest_that_fits_quantized() -> None:
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
