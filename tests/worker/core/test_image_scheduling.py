"""Images of prompts: one is encoded per step, once for all rows that have it, without delaying other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.messages import CacheCleared
from protocol.types import ImageStatus
from tests.worker.core.prefix.test_store import PLENTY, cached, reused
from tests.worker.engines import House, Image, ScriptedEngine, breaking, picture
from worker.core.commands import ClearPrefixes
from worker.values import CacheSpec

CAT, DOG = picture("cat", 0, 1).digest, picture("dog", 0, 1).digest


def storing(shape: CacheSpec) -> House:
    return House(prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)


def status(house: House) -> ImageStatus:
    assert house.loop.counters.images is not None
    return house.loop.counters.images


def test_a_prompt_is_run_up_to_an_image_then_on_with_it() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=50, images=[("cat", 20, 8), ("dog", 28, 4)])
    house.run()
    assert house.text("a") == "<5>"
    assert house.engine.sizes == [20, 8, 21]
    assert house.engine.looks == [CAT, DOG]


def test_streams_get_a_token_between_two_images_and_no_prompt_is_run_beside_one() -> None:
    house = House(prefill_tokens=64)
    happened: list[str] = []
    house.engine.takes = lambda kind, size: happened.append(kind)
    images: list[Image] = [(f"image {n}", 3 * n, 3) for n in range(4)]
    house.submit("stream", *range(1, 40), prompt=1)
    house.engine.at["step", 5] = lambda: house.submit("seeing", 5, prompt=13, images=images)
    house.engine.at["step", 6] = lambda: house.submit("text", 6, prompt=640)
    house.run()
    around = [happened[at - 1 : at + 2] for at, what in enumerate(happened) if what == "look"]
    assert around == [["step", "look", "step"]] * 4
    assert house.text("text") == "<6>"


def test_image_encoding_time_does_not_affect_the_prefill_cost_model() -> None:
    def chunks(look_s: float) -> list[int]:
        house = House(prefill_tokens=2048)
        costs: dict[str, Callable[[int], float]] = {
            "look": lambda size: look_s,
            "step": lambda size: 0.01,
            "prefill": lambda size: 0.0005 * size,
        }

        def take(kind: str, size: int) -> None:
            house.now += costs[kind](size)

        house.engine.takes = take
        house.submit("stream", *range(1, 90), prompt=1)
        images: list[Image] = [(f"image {n}", 300 * n, 20) for n in range(6)]
        house.submit("seeing", 5, prompt=2000, images=images)
        house.run()
        return house.engine.sizes

    assert chunks(50.0) == chunks(0.0)


@pytest.mark.parametrize("what", ["look", "show"])
def test_image_failure_fails_only_its_row_and_duplicates_retry(what: str) -> None:
    house = House(prefill_tokens=64)
    house.submit("stream", *range(1, 30), prompt=1)
    images: list[Image] = [("cat", 4, 8)]
    house.submit("a", 5, prompt=20, images=images)
    house.submit("same image", 6, prompt=20, images=images)
    house.submit("same prompt", 7, like="a")
    house.engine.at[what, 0] = breaking("scripted")
    house.run()
    assert house.failed("a")
    assert house.text("same image") == "<6>"
    assert house.text("same prompt") == "<7>"
    assert house.reason("stream") == "stop"
    assert house.engine.looks == [CAT]
    assert house.engine.probes == 1


@pytest.mark.parametrize("has_states", [False, True])
def test_the_same_question_looks_at_nothing_and_runs_its_last_token(has_states: bool) -> None:
    house = storing(CacheSpec(has_states=has_states))
    house.submit("first", 5, prompt=600, images=[("cat", 100, 300)])
    house.run()
    house.loop.scheduler.forget_images()
    house.submit("again", 6, like="first")
    house.run()
    assert house.engine.looks == [CAT]
    assert cached(house, "again") == 599


@pytest.mark.parametrize("has_states", [False, True])
def test_another_short_question_about_the_same_images_runs_nothing_of_them(has_states: bool) -> None:
    house = storing(CacheSpec(has_states=has_states))
    images: list[Image] = [("cat", 5, 30), ("dog", 40, 20)]
    for number, id in enumerate(("first", "second")):
        tail = range(1000 * (1 + number), 1000 * (1 + number) + 30)
        house.submit(id, 5, tokens=(*range(1, 61), *tail), images=images)
        house.run()
    assert reused(house, "second").reuse.tokens == 60
    assert house.engine.sizes[-1] == 29
    assert house.engine.looks == [CAT, DOG]


def test_a_prefix_that_ends_within_an_image_needs_the_image() -> None:
    house = storing(CacheSpec())
    house.submit("first", 5, prompt=600, images=[("cat", 100, 400)])
    house.engine.at["prefill", 2] = lambda: house.drop("first")
    house.run()
    assert 100 < sum(house.engine.sizes) < 500
    house.loop.scheduler.forget_images()
    house.submit("again", 5, like="first")
    house.run()
    assert house.text("again") == "<5>"
    assert house.engine.looks == [CAT, CAT]
    assert reused(house, "again").reuse.tokens > 100


def test_two_images_in_one_place_are_told_apart_and_why() -> None:
    house = storing(CacheSpec())
    tokens = tuple(range(1, 500))
    for id, name in (("first", "cat"), ("second", "dog")):
        house.submit(id, 5, tokens=tokens, images=[(name, 100, 50)])
        house.run()
    assert reused(house, "second").reuse.tokens == 100
    assert reused(house, "second").reuse.miss == "diverged_at_100"
    assert house.engine.looks == [CAT, DOG]


def test_clearing_the_cache_forgets_images_too() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=20, images=[("cat", 4, 8)])
    house.run()
    assert (status(house).kept, status(house).bytes) == (1, 8)
    house.inbox.put(ClearPrefixes("clear-1"))
    house.run()
    [cleared] = [message for message in house.published if isinstance(message, CacheCleared)]
    assert cleared.ram_bytes == 8
    assert not house.engine.kept
    assert status(house).kept == 0
