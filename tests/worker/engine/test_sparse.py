"""Rows of which parts of the prompt are left out say, alone and in company, what a row says that has those
parts where nothing can see them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from tests.worker import proven
from worker.contract import Draw, Piece
from worker.engine.caches import stored
from worker.engine.caches.gaps import hiding
from worker.engine.engine import BatchEngine
from worker.engine.following import Followers

ARCHITECTURES = ("dense", "hybrid", "llama_4bit", "deepseek_v3", "falcon_h1", "kimi_linear")
Span = tuple[int, int]


@cache
def network(name: str) -> Any:
    return load_model(model_folder(name))[0]


def engine_of(name: str) -> BatchEngine:
    return proven.engine(network, name)


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 90) for _ in range(tokens))


def hidden(name: str, prompt: tuple[int, ...], spans: list[Span], count: int) -> list[int]:
    """What a single row says greedily from which these parts are hidden."""
    model, rows = network(name), make_prompt_cache(network(name))
    begin = 0
    for first, last in spans:
        given = hiding(rows, *(span for span in spans if span[1] <= begin))
        model(mx.array([prompt[begin:first]], mx.uint32), cache=given)
        states = stored.states_of(rows, 0)
        model(mx.array([prompt[first:last]], mx.uint32), cache=given)
        columns, _ = stored.columns_of(rows, 0, 0, last)
        rows = make_prompt_cache(model)
        stored.rebuild(rows, [Piece(columns, 0, last, last)], states)
        begin = last
    given, said = hiding(rows, *spans), []
    tokens = prompt[begin:]
    for _ in range(count):
        logits = model(mx.array([tokens], mx.uint32), cache=given)
        tokens = (int(mx.argmax(logits[0, -1]).item()),)  # type: ignore[arg-type]
        said += tokens
    return said


def begin(engine: BatchEngine, row: str, prompt: tuple[int, ...], spans: list[Span]) -> None:
    at = 0
    for first, last in [*spans, (len(prompt) - 1, 0)]:
        engine.prefill({row: prompt[at:first]})
        if last:
            engine.leave_out(row, last - first)
        at = last
    engine.start(row, prompt, len(prompt), Draw())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_said_is_what_is_said_where_the_rest_is_hidden(name: str) -> None:
    engine = engine_of(name)
    assert engine.can_leave_out
    rows: dict[str, tuple[tuple[int, ...], list[Span]]] = {
        "two": (prompt_of(1, 60), [(10, 24), (30, 41)]),
        "dense": (prompt_of(2, 33), []),
        "late": (prompt_of(3, 52), [(20, 45)]),
    }
    said: dict[str, list[int]] = {row: [] for row in rows}
    coming = dict(rows)
    for step in range(24):
        if step % 4 == 0 and coming:
            row = next(iter(coming))
            begin(engine, row, *coming.pop(row))
        # A row for which drafts are made leaves the others' company, and comes back to it.
        drafts = {"dense": (5, 6)} if 10 <= step < 14 else {}
        drawn = engine.step(drafts)
        for row, token in drawn.tokens.items():
            said[row] += [token, *(each.token for each in drawn.further.get(row, ()))]
    for row, (prompt, spans) in rows.items():
        assert len(said[row]) >= 12
        assert said[row] == hidden(name, prompt, spans, len(said[row]))


def test_a_copy_begins_where_the_row_stands() -> None:
    engine, prompt = engine_of("hybrid"), prompt_of(4, 40)
    engine.prefill({"a": prompt[:12]})
    engine.leave_out("a", 10)
    engine.prefill({"a": prompt[22:-1]})
    engine.fork("a", "b")
    for row in "ab":
        engine.start(row, prompt, len(prompt), Draw())
    steps = [engine.step().tokens for _ in range(6)][1:]
    assert [step["a"] for step in steps] == [step["b"] for step in steps]
    assert [step["a"] for step in steps] == hidden("hybrid", prompt, [(12, 22)], 5)


def test_a_dropped_row_leaves_no_gap_to_the_next_of_its_name() -> None:
    engine, prompt = engine_of("dense"), prompt_of(5, 30)
    engine.prefill({"a": prompt[:10]})
    engine.leave_out("a", 5)
    engine.drop("a")
    begin(engine, "a", prompt, [])
    said = [engine.step().tokens for _ in range(5)][1:]
    assert [step["a"] for step in said] == hidden("dense", prompt, [], 4)


@pytest.mark.parametrize("name", ["dense", "hybrid", "sliding"])
def test_a_prompt_is_weighed_token_by_token_and_the_row_goes_on_as_it_was(name: str) -> None:
    follower, prompt = Followers(network(name), 0.1, 2048), prompt_of(6, 50)
    follower.read("a", prompt[:-1])
    before = [cache.offset for cache in follower._flocks.own("a") if hasattr(cache, "offset")]
    weights = follower.weigh("a", prompt[-1])
    assert len(weights) == len(prompt) - 1
    assert all(weight >= 0 for weight in weights)
    assert sum(weights) > 0
    assert follower.length("a") == len(prompt) - 1
    assert [cache.offset for cache in follower._flocks.own("a") if hasattr(cache, "offset")] == before


def test_what_weighs_most_changes_the_answer_most() -> None:
    """By differences: each token's column hidden in turn."""
    prompt, model = prompt_of(7, 24), network("dense")
    follower = Followers(model, 0.1, 2048)
    follower.read("a", prompt[:-1])
    weights = follower.weigh("a", prompt[-1])
    caches = follower._flocks.own("a")
    last = mx.array([prompt[-1:]], mx.uint32)

    def logits(place: int) -> mx.array:
        rows = make_prompt_cache(model)
        columns, _ = stored.columns_of(caches, 0, 0, len(prompt) - 1)
        stored.rebuild(rows, [Piece(columns, 0, len(prompt) - 1, len(prompt) - 1)], None)
        out: mx.array = model(last, cache=hiding(rows, (place, place + 1)))
        return out[0, -1]

    usual = logits(len(prompt))
    changes = [float(mx.linalg.norm(logits(place) - usual)) for place in range(len(prompt) - 1)]
    heaviest = sorted(range(len(weights)), key=lambda place: -weights[place])
    assert sum(changes[place] for place in heaviest[:6]) > 1.5 * sum(
        changes[place] for place in heaviest[-6:]
    )


def test_a_network_that_has_only_states_weighs_nothing() -> None:
    target = network("dense")
    assert BatchEngine(target, drafter=Followers(network("mamba"), 0.1, 2048)).weigher is None
    assert BatchEngine(target, drafter=Followers(network("hybrid"), 0.1, 2048)).weigher is not None
