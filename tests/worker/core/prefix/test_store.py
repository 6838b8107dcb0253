"""Prefix reuse: the loop, the scheduler and the store on a scripted engine.

The engine keeps a row's tokens as its cache, and records every inconsistency.
"""

from __future__ import annotations

import random

import pytest

from protocol.messages import Finished, PrefixHit
from tests.worker.engines import END, House, ScriptedEngine, breaking
from worker.values import CacheSpec, MessageEnd

DENSE, HYBRID, SLIDING = CacheSpec(), CacheSpec(has_states=True), CacheSpec(window=31)
SHAPES = {"dense": DENSE, "hybrid": HYBRID, "sliding": SLIDING}
PLENTY = 10**9
CHUNK = 256


def _house(shape: CacheSpec, *, rows_max: int = 16, store_bytes: int = PLENTY, **options: int) -> House:
    engine = ScriptedEngine(shape=shape)
    return House(rows_max=rows_max, prefill_tokens=CHUNK, engine=engine, store_bytes=store_bytes, **options)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 2**31) for _ in range(count))


def reused(house: House, id: str) -> PrefixHit:
    [hit] = [message for message in house.published if isinstance(message, PrefixHit) and message.id == id]
    return hit


def cached(house: House, id: str) -> int:
    end = house.end(id)
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == reused(house, id).reuse.tokens
    return end.usage.cached_tokens


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_next_turn_begins_behind_the_last_answer(shape: CacheSpec) -> None:
    house = _house(shape)
    prompt = tokens(1, 700)
    house.submit("first", 5, 6, 7, tokens=prompt)
    house.run()
    house.submit("second", 8, tokens=(*prompt, 5, 6, 7, END, *tokens(2, 40)))
    house.run()
    assert cached(house, "first") == 0
    assert reused(house, "first").reuse.miss == "diverged_at_0"
    assert cached(house, "second") == 704
    assert reused(house, "second").reuse.tier == "ram"
    assert house.text("second") == "<8>"


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_ends_of_prompts_with_one_stored_prefix_run_in_one_call(*, is_broken: bool) -> None:
    house = _house(DENSE)
    shared = tokens(1, 300)
    house.submit("first", 5, tokens=(*shared, *tokens(2, 30)))
    house.run()
    ends = {"b": 40, "c": 37, "d": 41}
    for id, count in ends.items():
        house.submit(id, ord(id), tokens=(*shared, *tokens(ord(id), count)))
    if is_broken:
        house.engine.at["prefill", house.engine.calls["prefill"] + 1] = breaking("it")
    before = len(house.engine.groups)
    house.run()
    together, *apart = house.engine.groups[before:]
    assert sorted(together) == ["b", "c", "d"]
    assert sorted(apart) == ([["b"], ["c"], ["d"]] if is_broken else [])
    assert {id: house.text(id) for id in ends} == {id: f"<{ord(id)}>" for id in ends}
    assert {cached(house, id) for id in ends} == {300}


def test_states_are_kept_at_the_boundaries_of_a_prompt() -> None:
    house = _house(HYBRID)
    system = tokens(1, 500)
    house.submit("one", 5, tokens=(*system, *tokens(2, 300)), boundaries=(500, 777))
    house.run()
    ends = (MessageEnd(500, "system"), MessageEnd(600, "user"))
    house.submit("other", 5, tokens=(*system, *tokens(3, 300)), boundaries=(500, 777), message_ends=ends)
    house.run()
    assert cached(house, "other") == 500
    reuse = reused(house, "other").reuse
    assert (reuse.miss, reuse.message, reuse.role) == ("diverged_at_500", 0, "system")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sixteen_that_begin_alike_compute_it_once(shape: CacheSpec) -> None:
    house = _house(shape)
    prefix = tokens(1, 1500)
    for number in range(16):
        house.submit(f"row {number}", 5, tokens=(*prefix, *tokens(100 + number, 20)))
    house.run()
    assert sum(house.engine.sizes) <= 1.3 * 1520
    assert all(house.text(f"row {number}") == "<5>" for number in range(16))


def test_whom_a_row_waits_for_may_leave() -> None:
    house = _house(HYBRID)
    prefix = tokens(1, 3000)
    house.submit("first", 5, tokens=(*prefix, 1))
    house.submit("second", 6, tokens=(*prefix, 2))
    house.submit("third", 7, tokens=(*prefix, 3))
    # Two chunks of the first prompt have run.
    house.engine.at["prefill", 2] = lambda: house.drop("first")
    house.run()
    assert house.ends("first") == []
    assert house.text("second") == "<6>"
    assert house.text("third") == "<7>"
    # The first row's chunks were neither lost nor computed twice.
    assert sum(house.engine.sizes) <= 3100


def test_a_prefix_that_cannot_be_restored_is_forgotten_and_computed() -> None:
    house = _house(DENSE)
    house.submit("first", 5, prompt=600)
    house.run()
    restore = house.engine.restore
    tries = []

    def fail(row: str, *rest: object) -> None:
        tries.append(row)
        raise RuntimeError("no memory")

    house.engine.restore = fail  # type: ignore[method-assign]
    house.submit("again", 5, like="first")
    house.run()
    house.engine.restore = restore  # type: ignore[method-assign]
    assert tries == ["again"]
    assert house.text("again") == "<5>"
    assert cached(house, "again") == 0


def test_rows_get_memory_before_prefixes() -> None:
    house = _house(DENSE, bytes_max=4000)
    for number in range(6):
        house.submit(f"row {number}", 5, prompt=900)
        house.run()
        assert house.store is not None
        assert house.store.index.ram_bytes + 900 <= 4000 + 64
    assert all(house.text(f"row {number}") == "<5>" for number in range(6))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_that_ends_between_its_resume_and_the_next_step_stores_what_its_caches_hold(shape: str) -> None:
    house = _house(SHAPES[shape])
    house.submit("first", *range(1, 40), prompt=200, resume=tuple(range(1, 20)))
    house.engine.at["prefill", 1] = lambda: house.drop("first")
    house.run()
    whole = (*house.engine.prompts["first"], *range(1, 20))
    house.submit("next", 90, tokens=(*whole, *range(500, 520)))
    house.run()
    assert cached(house, "next") == len(whole) - 1
    assert house.engine.breaches == []


def test_prefixes_of_ended_rows_take_only_what_running_ones_leave() -> None:
    house = _house(DENSE, bytes_max=60_000)
    house.submit("long", *range(1, 60), prompt=900)
    house.submit("short", 5, tokens=tokens(1, 1200))
    beyond: list[int] = []

    def check(kind: str, size: int) -> None:
        spare = house.loop.scheduler.reservations.spare(0)
        assert house.store is not None
        assert spare is not None
        beyond.append((house.store.index.ram_bytes - spare) * (kind == "step"))

    house.engine.takes = check
    house.run()
    assert max(beyond) <= 0


def test_a_conversation_that_takes_most_of_the_memory_is_not_computed_again() -> None:
    house, prompt = _house(DENSE, bytes_max=69_500), tokens(1, 1500)
    house.submit("first", 5, tokens=prompt)
    house.run()
    house.submit("second", 5, tokens=(*prompt, 5, END, *tokens(2, 9000)))
    house.run()
    assert cached(house, "second") == 1502


def test_what_a_decoding_row_has_of_its_own_is_evicted_first_and_stored_again() -> None:
    shared, own = tokens(1, 600), tokens(2, 600)
    house = _house(DENSE, bytes_max=10**6)
    house.submit("other", 5, tokens=(*shared, *tokens(3, 600)))
    house.submit("row", *range(1, 40), tokens=(*shared, *own))
    assert house.store is not None
    store, index, lengths = house.store, house.store.index, list[int]()

    def squeeze() -> None:
        rows = [row for row in house.loop.scheduler.decoding if row.id == "row"]
        store.fit(index.ram_bytes - 1, rows=rows)
        for prompt in ((*shared, *tokens(3, 600)), (*shared, *own)):
            lengths.append(index.find(prompt, limit=1200).length)

    house.engine.at["step", 30] = squeeze
    house.run()
    assert lengths[0] == 1200
    assert 600 <= lengths[1] < 1200
    assert index.find((*shared, *own), limit=1200).length == 1200
