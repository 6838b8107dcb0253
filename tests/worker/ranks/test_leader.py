"""The leader forwards every call that concerns rows, and a follower that executes them has the same rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.utils import load_model

from protocol.settings.worker import WorkerSettings
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.worker.engines import Broken, ScriptedEngine
from tests.worker.ranks.pair import Pair
from tests.worker.zoo import play
from worker.interfaces import Model, ModelError
from worker.ranks import rpc
from worker.ranks.line import RankGoneError
from worker.ranks.loader import SetLoader
from worker.runner.runner import BatchEngine
from worker.values import CacheSpec, ModelInfo, SamplingParams


@pytest.fixture(autouse=True)
def engines_are_let_go_of() -> Iterator[None]:
    """Collect engines and their threads: a pair is a reference cycle."""
    yield
    gc.collect()


def pair(architecture: str) -> Pair:
    """Return two engines on one network, each with its rows."""
    network, _ = load_model(model_folder(architecture))
    both = Pair()
    own = BatchEngine(network, agree=both.lead)
    both.join(own, BatchEngine(network, own.capabilities, agree=both.follow))
    return both


@pytest.mark.parametrize(("architecture", "seed"), [("dense", 7), ("hybrid", 3)])
def test_rows_of_random_lives_are_the_same_on_both(architecture: str, seed: int, oracle: Oracle) -> None:
    both = pair(architecture)
    model = Model(ModelInfo("m", 4096, 0, None), both.leader, None, None)  # type: ignore[arg-type]
    # `make soak LANES=sets` runs more of these on all families.
    played = play(model, architecture, seed, oracle, 6)
    assert played.differences == []
    both.flush()
    assert both.own_steps == both.other_steps
    assert sum(map(len, both.own_steps)) > 100
    assert {"forked", "dropped"} <= played.seen
    gc.collect()
    both.leader.reset()  # releases the remaining rows
    both.flush()
    assert both.follower.kept == {}
    assert both.other.cache_bytes() == both.own.cache_bytes() == 0


def test_both_verify_the_drafts_of_a_step(oracle: Oracle) -> None:
    both = pair("dense")
    model = Model(ModelInfo("m", 4096, 0, None), both.leader, None, None)  # type: ignore[arg-type]
    assert play(model, "dense", 1, oracle, 4, drafted=True).differences == []
    both.flush()
    assert both.own_steps == both.other_steps
    assert any(isinstance(call, rpc.RunStep) and call.drafts for call in both.called)


def test_failure_after_a_broadcast_call_is_fatal() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())

    def fail() -> None:
        raise Broken("prefill")

    both.own.prompts["a"] = (1, 2, 3)  # type: ignore[attr-defined]
    both.own.at["prefill", 0] = fail  # type: ignore[attr-defined]
    with pytest.raises(RankGoneError, match="Prefill failed"):
        both.leader.prefill({"a": [1, 2]})
    assert not isinstance(RankGoneError(), Exception)


def test_a_row_that_fails_to_start_is_an_ordinary_failure_and_is_dropped_everywhere() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())
    for engine in (both.own, both.other):
        engine.prompts["a"] = (1,)  # type: ignore[attr-defined]

    def fail() -> None:
        raise Broken("start")

    both.own.at["start", 0] = fail  # type: ignore[attr-defined]
    with pytest.raises(Broken):
        both.leader.start("a", (1,), 1, SamplingParams())
    both.leader.drop("a")
    both.flush()
    assert both.other.decoding == {}  # type: ignore[attr-defined]


def test_cuts_are_numbered_and_let_go_of_with_the_next_call() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())
    for engine in (both.own, both.other):
        scripted: ScriptedEngine = engine  # type: ignore[assignment]
        scripted.shape, scripted.prompts["a"] = CacheSpec(has_states=True), (1, 2, 3, 4)
    both.leader.prefill({"a": (1, 2, 3)})
    cuts, states = both.leader.copy_cache("a", [(0, 2), (2, 3)], states=True)
    both.flush()
    assert states is not None
    assert dict(both.follower.kept) == {0: (1, 2), 1: (3,), 2: (1, 2, 3)}
    del cuts, states
    gc.collect()
    both.leader.drop("a")
    both.flush()
    assert both.follower.kept == {}


@pytest.mark.parametrize("option", ["exact", "experts_memory", "draft_model"])
def test_what_one_machine_alone_does_is_refused_by_name(option: str) -> None:
    meeting: Any = SimpleNamespace(line=SimpleNamespace(receive=None), backend="ring")
    settings = WorkerSettings(model="m", **{option: "itself" if option == "draft_model" else 1})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"--{option.replace('_', '-')} is for models that one machine runs"):
        SetLoader(settings, meeting).load(lambda done, total: None)
