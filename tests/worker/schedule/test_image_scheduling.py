"""Images of prompts: one is encoded per step, once for all rows that have it, without delaying other rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from protocol.messages import CacheCleared, Finished, PrefixHit
from protocol.types import ImageStatus
from tests.worker.engines import House, Image, ScriptedEngine, breaking, picture
from worker.contract.engine import CacheSpec
from worker.schedule.commands import ClearPrefixes

PLENTY = 10**9
CAT, DOG = picture("cat", 0, 1).digest, picture("dog", 0, 1).digest


def happenings(house: House) -> list[str]:
    """Return a list that fills with the engine's calls."""
    happened: list[str] = []
    house.engine.takes = lambda kind, size: happened.append(kind)
    return happened


def storing(shape: CacheSpec) -> House:
    return House(prefill_tokens=256, engine=ScriptedEngine(shape=shape), store_bytes=PLENTY)


def forget_images(house: House) -> None:
    """Evict all images, but not the prefixes."""
    digests, _ = house.loop.scheduler.forget_images()
    for digest in digests:
        house.engine.evict_image(digest)


def status(house: House) -> ImageStatus:
    assert house.loop.counters.images is not None
    return house.loop.counters.images


def reused(house: House, id: str) -> PrefixHit:
    [told] = [message for message in house.published if isinstance(message, PrefixHit) and message.id == id]
    return told


# --- one image per step ------------------------------------------------------------------------------


def test_a_prompt_is_run_up_to_an_image_then_on_with_it() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=50, images=[("cat", 20, 8), ("dog", 28, 4)])
    house.run()
    assert house.text("a") == "<5>"
    assert house.engine.sizes == [20, 8, 21]
    assert house.engine.looks == [CAT, DOG]


def test_streams_get_a_token_between_two_images_and_no_prompt_is_run_beside_one() -> None:
    house = House(prefill_tokens=64)
    happened = happenings(house)
    images: list[Image] = [(f"image {n}", 3 * n, 3) for n in range(4)]
    house.submit("stream", *range(1, 40), prompt=1)
    house.engine.at["step", 5] = lambda: house.submit("seeing", 5, prompt=13, images=images)
    house.engine.at["step", 6] = lambda: house.submit("text", 6, prompt=640)
    house.run()
    around = [happened[at - 1 : at + 2] for at, what in enumerate(happened) if what == "look"]
    assert around == [["step", "look", "step"]] * 4
    assert house.text("text") == "<6>"


def test_the_step_counter_goes_on_with_every_image() -> None:
    house = House(prefill_tokens=64)
    counted: list[int] = []
    house.engine.takes = lambda kind, size: counted.append(house.loop.counters.steps)
    house.submit("a", 5, prompt=9, images=[("cat", 0, 4), ("dog", 4, 4)])
    house.run()
    assert len(set(counted[:4])) == 4


def test_a_text_goes_before_an_image_whose_turn_has_not_come_where_there_is_time_left() -> None:
    house = House(prefill_tokens=128)
    happened = happenings(house)
    house.submit("first", 5, prompt=16)
    house.submit("seeing", 6, prompt=20, images=[("cat", 0, 8)])
    house.submit("behind", 7, prompt=41)
    house.run()
    assert happened[: happened.index("look")].count("prefill") == 2
    assert house.engine.groups == [["first"], ["behind"], ["seeing"]]


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


# --- commands and failures ---------------------------------------------------------------------------


def test_a_cancel_is_heard_between_two_images() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=20, images=[(f"image {n}", 3 * n, 3) for n in range(5)])
    house.engine.at["look", 1] = lambda: house.drop("a")
    house.run()
    assert (len(house.engine.looks), house.ends("a")) == (2, [])


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


def test_a_prompt_shared_by_several_fails_one_by_one_where_its_image_cannot_be_encoded() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=20, images=[("cat", 4, 8)])
    for id in "bc":
        house.submit(id, 5, like="a")
    for number in range(3):
        house.engine.at["look", number] = breaking("scripted")
    house.run()
    assert all(house.failed(id) for id in "abc")


def test_copies_share_what_was_seen() -> None:
    house = House(prefill_tokens=64)
    house.submit("a", 5, prompt=20, images=[("cat", 4, 8)])
    house.submit("b", 6, like="a")
    house.run()
    assert (house.text("a"), house.text("b")) == ("<5>", "<6>")
    assert house.engine.forks == [("a", "b")]
    assert house.engine.looks == [CAT]
    assert (status(house).encoded, status(house).hits) == (1, 0)


def test_after_a_failed_step_rows_are_shown_anew_and_images_are_still_kept() -> None:
    house = House(prefill_tokens=4)
    house.submit("stream", *range(1, 30), prompt=1)
    house.submit("a", 5, prompt=40, images=[("cat", 4, 8)])
    house.engine.at["step", 7] = breaking("scripted")
    house.run()
    assert house.failed("stream")
    assert house.text("a") == "<5>"
    assert house.engine.looks == [CAT]
    assert house.engine.calls["show"] >= 1


def test_a_preempted_row_is_shown_its_images_again_in_front_of_what_it_has_answered() -> None:
    house = House(prefill_tokens=64, bytes_max=256)
    for id in "ab":
        house.submit(id, *range(1, 120), prompt=60, images=[(id, 7, 20)], max_tokens=110)
    house.run()
    assert house.engine.calls["show"] > 1
    assert len(house.engine.looks) == 2
    for id in "ab":
        assert house.tokens(id) == list(range(1, 111))


# --- reuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_states", [False, True])
def test_the_same_question_looks_at_nothing_and_runs_its_last_token(has_states: bool) -> None:
    house = storing(CacheSpec(has_states=has_states))
    house.submit("first", 5, prompt=600, images=[("cat", 100, 300)])
    house.run()
    forget_images(house)
    house.submit("again", 6, like="first")
    house.run()
    assert house.engine.looks == [CAT]
    assert reused(house, "again").reuse.tokens == 599
    end = house.end("again")
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 599


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
    forget_images(house)
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
    assert reused(house, "second").reuse.miss == "media_differs"
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
    assert house.engine.kept == {}
    assert status(house).kept == 0


def test_an_image_that_can_never_be_kept_is_refused() -> None:
    house = House(prefill_tokens=64, image_bytes_max=7)
    house.submit("large", 5, prompt=20, images=[("cat", 4, 8)])
    house.submit("small", 6, prompt=20, images=[("cat", 4, 7)])
    house.run()
    assert house.failed("large")
    assert house.text("small") == "<6>"


@pytest.mark.parametrize("seed", range(8))
def test_histories_of_images(seed: int) -> None:
    """Random prompts with recurring images, little memory for them, prefix reuse, failures and cancels."""
    rng = random.Random(seed)
    engine = ScriptedEngine(shape=CacheSpec(has_states=rng.random() < 0.3))
    engine.swells = rng.choice((0.5, 1.0, 1.0, 1.4))
    house = House(
        rows_max=rng.randint(1, 5),
        prefill_tokens=rng.choice((8, 64, 256)),
        bytes_max=rng.choice((None, 900)),
        engine=engine,
        store_bytes=rng.choice((None, 0, 20_000, PLENTY)),
        image_bytes_max=rng.choice((None, 40, 120)),
    )
    engine.takes = lambda kind, size: check(house)
    expected: dict[str, str] = {}
    for number in range(40):
        id, script = f"row {number}", range(1, rng.randint(1, 40))
        if expected and rng.random() < 0.2:
            house.submit(id, *script, like=rng.choice(list(expected)))
        else:
            shared = tuple(range(1, rng.randint(2, 200)))
            tokens = (*shared, *(rng.randrange(1000, 9000) for _ in range(rng.randint(60, 200))))
            house.submit(id, *script, tokens=tokens, images=images_of(rng), salt=rng.choice(("", "", "x")))
        expected[id] = "".join(f"<{token}>" for token in script)
        if rng.random() < 0.2:
            kind = rng.choice(("look", "look", "prefill", "step"))
            house.engine.at[kind, rng.randrange(80)] = lambda id=id: house.drop(id)  # type: ignore[misc]
        if rng.random() < 0.1:
            house.engine.at[rng.choice(("look", "prefill", "step")), rng.randrange(60)] = breaking("scripted")
        if rng.random() < 0.3:
            house.run()
    house.run()
    for id, text in expected.items():
        cut_short = house.ends(id) == [] or house.failed(id)
        assert house.text(id) == text or (cut_short and text.startswith(house.text(id)))
    ended = [id for id in expected if house.ends(id) and not house.failed(id)]
    assert sum(house.text(id) == expected[id] for id in ended) > 15
    assert house.engine.looks


def images_of(rng: random.Random) -> list[Image]:
    """Draw up to three images from a few that recur."""
    places = sorted(rng.sample(range(0, 60, 20), rng.randint(0, 3)))
    sizes = {name: 4 + 3 * number for number, name in enumerate("abcdef")}
    return [(name, place, sizes[name]) for place in places for name in rng.choice("abcdef")]


def check(house: House) -> None:
    limit, kept = house.image_bytes_max, house.engine.kept
    # A new image that is larger than estimated evicts others a moment later.
    assert limit is None or house.engine.swells > 1 or sum(kept.values()) <= limit
