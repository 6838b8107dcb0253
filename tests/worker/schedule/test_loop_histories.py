"""Any history of requests, cancels and failures, on a scripted engine."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engines import (
    END,
    House,
    Image,
    ScriptedEngine,
    breaking,
)
from worker.contract.kv_quantization import KVQuantization

asked = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 30),
        "length": st.integers(0, 90),
        "max_tokens": st.integers(1, 80),
        "twin": st.booleans(),
        "priority": st.integers(0, 1),
        "deadline_s": st.sampled_from([None, None, None, 60.0]),
        "images": st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 6)), max_size=3
        ),
    }
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


def placed(images: list[tuple[str, int, int]], prompt: int) -> list[Image]:
    """Place images one after another, each after some text tokens, as far as the prompt is long enough."""
    found: list[Image] = []
    end = 0
    for name, gap, tokens in images:
        if end + gap + tokens < prompt:
            found.append((f"{name}{tokens}", end + gap, tokens))
            end += gap + tokens
    return found


@given(
    st.lists(asked, min_size=1, max_size=8),
    happenings,
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([None, None, 128, 192, 320]),
    st.sampled_from([None, 6, 9]),
    st.sampled_from([None, None, (0, 8), (12, 8), (40, 16)]),
)
@settings(max_examples=120)
def test_whatever_happens_everyone_ends_once_and_nothing_is_left(
    requests: list[dict[str, Any]],
    happening: list[tuple[str, int, str, int]],
    rows_max: int,
    prefill_tokens: int,
    bytes_max: int | None,
    image_bytes_max: int | None,
    quantized: tuple[int, int] | None,
) -> None:
    house = House(
        engine=ScriptedEngine(kv_quantization=KVQuantization(8, 64, *quantized) if quantized else None),
        rows_max=rows_max,
        prefill_tokens=prefill_tokens,
        bytes_max=bytes_max,
        image_bytes_max=image_bytes_max,
    )
    dropped: set[str] = set()
    scripts, longest = dict[str, list[int]](), dict[str, int]()

    def submit(request: dict[str, Any]) -> None:
        id, number = f"r{len(scripts)}", len(scripts)
        scripts[id] = [100 * number + n + 1 for n in range(request["length"])]
        longest[id] = request["max_tokens"]
        house.submit(
            id,
            *scripts[id],
            prompt=request["prompt"],
            images=placed(request["images"], request["prompt"]),
            like=f"r{number - 1}" if request["twin"] and number else None,
            max_tokens=longest[id],
            priority=request["priority"],
            deadline_s=request["deadline_s"],
        )

    def drop(number: int | None) -> None:
        ids = list(scripts) if number is None else [f"r{number}"]
        dropped.update(id for id in ids if not house.ends(id))
        for id in ids:
            house.drop(id)

    def pass_time() -> bool:
        house.now += 1.0
        return house.engine.cache_bytes() <= (bytes_max or 10**9)

    for request in requests:
        submit(request)
    for kind, call, what, number in happening:
        house.engine.at[kind, call] = {
            "fail": breaking("scripted"),
            "drop": lambda number=number: drop(number),
            "drop all": lambda: drop(None),
            "submit": lambda number=number: submit(requests[number % len(requests)]),
            "ill": lambda number=number, call=call: house.engine.ill.update({f"r{number}": call}),
        }[what]
    within: list[bool] = []
    house.publish_also = lambda: within.append(pass_time())
    house.run()
    assert all(within)
    for id, script in scripts.items():
        whole = [*script, END][: longest[id]]
        said = house.tokens(id)
        assert said == whole[: len(said)]
        assert house.text(id) == "".join(f"<{token}>" for token in said if token != END)
        if id in dropped:
            # It may have ended in the same step in which it was dropped.
            assert len(house.ends(id)) <= 1
        elif not house.failed(id):
            ended_by_memory = bytes_max is not None and len(house.engine.prompts[id]) + len(said) >= bytes_max
            assert said == whole or ended_by_memory
            assert house.reason(id) == ("stop" if said[-1] == END else "length")
    assert all(len(house.ends(id)) == 1 for id in scripts if id not in dropped)
