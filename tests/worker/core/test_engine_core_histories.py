"""Any history of conversations, cancels and failures, on a scripted engine with or without a prefix store.

The engine records every breach of its contract, and prefix hits with another row's tokens, images or salt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.conversations import small_steps
from tests.worker.core.test_prompt_logprobs import ASKS, expected, told
from tests.worker.engines import END, House, Image, ScriptedEngine, breaking
from worker.values import CacheSpec, SamplingParams

SHAPES = [None, CacheSpec(), CacheSpec(has_states=True), CacheSpec(window=7)]
"""Caches of an engine without a prefix store, and of engines with one."""


@dataclass(frozen=True)
class Asked:
    """A request as it is drawn. It continues `shared` tokens of the request `follows` places before it, or is
    its `twin`."""

    prompt: int
    length: int
    max_tokens: int
    follows: int
    shared: int
    twin: bool
    images: tuple[Image, ...]
    resumed: int
    echo: bool
    salt: str
    priority: int
    deadline_s: float | None


asked = st.builds(
    Asked,
    prompt=st.integers(1, 30),
    length=st.integers(0, 90),
    max_tokens=st.integers(1, 80),
    follows=st.integers(0, 3),
    shared=st.integers(0, 60),
    twin=st.booleans(),
    images=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 6)), max_size=3).map(
        tuple
    ),
    resumed=st.sampled_from([0, 0, 0, 5, 40]),
    echo=st.sampled_from([False, False, True]),
    salt=st.sampled_from(["", "", "x"]),
    priority=st.integers(0, 1),
    deadline_s=st.sampled_from([None, None, None, 60.0]),
)
happenings = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "prefill", "start", "fork", "look", "show"]),
        st.integers(0, 40),
        st.sampled_from(["fail", "drop", "drop all", "submit", "ill"]),
        st.integers(0, 9),
    ),
    max_size=8,
)


def placed(images: tuple[Image, ...], prompt: int) -> list[Image]:
    """Place images one after another, each after some text tokens, as far as the prompt is long enough."""
    found: list[Image] = []
    end = 0
    for name, gap, tokens in images:
        if end + gap + tokens < prompt:
            found.append((f"{name}{tokens}", end + gap, tokens))
            end += gap + tokens
    return found


@dataclass
class History:
    """The requests of a loop, and what becomes of them."""

    house: House
    rows: dict[str, Asked] = field(default_factory=dict)
    images: dict[str, list[Image]] = field(default_factory=dict)
    asks: dict[str, bool] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    is_within: list[bool] = field(default_factory=list)

    def submit(self, asked: Asked) -> None:
        number = len(self.rows)
        id, script = f"r{number}", [100 * number + n + 1 for n in range(asked.length)]
        earlier = f"r{number - asked.follows}" if 0 < asked.follows <= number else None
        like = earlier if asked.twin else None
        tokens = tuple(range(10**5 * (number + 1), 10**5 * (number + 1) + asked.prompt))
        images = placed(asked.images, asked.prompt)
        if like is not None:
            images = self.images[like]
        elif earlier is not None:
            images, tokens = self.continued(earlier, asked.shared, tokens)
        self.rows[id], self.images[id] = asked, images
        asks = self.asks[id] = asked.echo and not images and not asked.resumed
        self.house.submit(
            id,
            *script,
            tokens=() if like else tokens,
            like=like,
            images=images,
            boundaries=(len(tokens) // 2,) if len(tokens) > 1 and not like else (),
            resume=tuple(script[: asked.resumed]),
            sampling=ASKS if asks else SamplingParams(),
            echo=asks,
            max_tokens=asked.max_tokens,
            salt=asked.salt,
            priority=asked.priority,
            deadline_s=asked.deadline_s,
        )

    def continued(
        self, earlier: str, shared: int, tokens: tuple[int, ...]
    ) -> tuple[list[Image], tuple[int, ...]]:
        """Return a prompt that begins with a part of an earlier conversation, and its images."""
        engine = self.house.engine
        whole = (*engine.prompts[earlier], *engine.scripts[earlier], END)[:shared]
        for _, first, count in self.images[earlier]:
            if first < len(whole) < first + count:
                whole = whole[:first]
        images = [image for image in self.images[earlier] if image[1] < len(whole)]
        return images, (*whole, *tokens)

    def drop(self, ids: list[str]) -> None:
        self.dropped.update(id for id in ids if not self.house.ends(id))
        for id in ids:
            self.house.drop(id)

    def happen(self, what: str, call: int, number: int, requests: list[Asked]) -> Callable[[], None]:
        """Return what happens at the `call`-th call of some kind."""
        return {
            "fail": breaking("scripted"),
            "drop": partial(self.drop, [f"r{number}"]),
            "drop all": lambda: self.drop(list(self.rows)),
            "submit": partial(self.submit, requests[number % len(requests)]),
            "ill": partial(self.house.engine.ill.update, {f"r{number}": call}),
        }[what]

    def pass_time(self) -> None:
        house = self.house
        house.now += 1.0
        self.is_within.append(house.engine.cache_bytes() <= (house.bytes_max or 10**9))
        images = sum(each.nbytes for each in house.engine.kept.values())
        self.is_within.append(house.engine.swells > 1 or images <= (house.image_bytes_max or 10**9))

    def check(self, id: str, asked: Asked) -> None:
        house = self.house
        script, said = [*house.engine.scripts[id]], house.tokens(id)
        resumed = len(script[: asked.resumed])
        whole = [*script, END][: asked.max_tokens][resumed:]
        assert said == whole[: len(said)]
        assert house.text(id) == "".join(f"<{token}>" for token in said if token != END)
        if id in self.dropped:
            # It may have ended in the same step in which it was dropped.
            assert len(house.ends(id)) <= 1
        elif not house.failed(id):
            length = len(house.engine.prompts[id]) + resumed + len(said)
            assert said == whole or (house.bytes_max is not None and length >= house.bytes_max)
            assert house.reason(id) == ("stop" if said[-1:] == [END] else "length")
            assert told(house, id) == (expected(house.engine.prompts[id]) if self.asks[id] else [])
        assert id in self.dropped or len(house.ends(id)) == 1


@given(
    st.lists(asked, min_size=1, max_size=8),
    happenings,
    st.sampled_from(SHAPES),
    st.sampled_from([0, 600, 10**9]),
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    st.sampled_from([None, None, 128, 192, 320]),
    st.tuples(st.sampled_from([None, 6, 9]), st.sampled_from([1.0, 1.0, 0.5, 1.4])),
    st.booleans(),
)
@settings(max_examples=120)
def test_whatever_happens_everyone_ends_once_and_nothing_is_left(
    requests: list[Asked],
    happening: list[tuple[str, int, str, int]],
    shape: CacheSpec | None,
    store_bytes: int,
    sizes: tuple[int, int],
    bytes_max: int | None,
    images: tuple[int | None, float],
    is_eager: bool,
) -> None:
    house = House(
        engine=ScriptedEngine(shape=shape, swells=images[1], is_eager=is_eager),
        store_bytes=None if shape is None else store_bytes,
        rows_max=sizes[0],
        prefill_tokens=sizes[1],
        bytes_max=bytes_max,
        image_bytes_max=images[0],
    )
    history = History(house)
    house.publish_also = history.pass_time
    with small_steps():
        for request in requests:
            history.submit(request)
        for kind, call, what, number in happening:
            house.engine.at[kind, call] = history.happen(what, call, number, requests)
        house.run()
    assert all(history.is_within)
    for id, request in history.rows.items():
        history.check(id, request)
