"""The leader passes on all that happens to rows, and a follower that obeys holds the same ones."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.worker.engines import Broken, ScriptedEngine
from tests.worker.ranks.pair import Pair
from tests.worker.ranks.sparse import differing
from tests.worker.zoo import Life, draw_jobs, play
from worker.contract import Draw, Facts, Model, Shape
from worker.engine.engine import BatchEngine
from worker.engine.following import Followers
from worker.ranks import calls
from worker.ranks.line import RankGoneError


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


@pytest.fixture(autouse=True)
def engines_are_let_go_of() -> Iterator[None]:
    """And their threads: a pair is a circle."""
    yield
    gc.collect()


def pair(architecture: str, *, drafts: bool = False) -> Pair:
    """Two engines on one network, each with its rows. `drafts`: it drafts for the first one, too."""
    network, _ = load_model(model_folder(architecture))
    both = Pair()
    own = BatchEngine(network, drafter=Followers(network, 0.5, 2048) if drafts else None, agree=both.lead)
    both.join(own, BatchEngine(network, own.abilities, agree=both.follow))
    return both


@pytest.mark.parametrize("architecture", ["dense", "hybrid"])
def test_rows_of_random_lives_are_the_same_on_both(architecture: str, oracle: Oracle) -> None:
    both = pair(architecture)
    model = Model(Facts("m", 4096, 0, None), both.leader, None, None)  # type: ignore[arg-type]
    seen: set[str] = set()
    for seed in range(3):
        played = play(model, architecture, seed, oracle, 9)
        assert played.differences == []
        seen |= played.seen
    both.flush()
    assert both.own.steps == both.other.steps
    assert sum(map(len, both.own.steps)) > 100
    assert {"forked", "dropped"} <= seen
    gc.collect()
    both.leader.reset()  # tells who is let go of
    both.flush()
    assert both.follower.kept == {}
    assert both.other.cache_bytes() == both.own.cache_bytes() == 0


def test_drafts_are_run_by_both(oracle: Oracle) -> None:
    both = pair("dense")
    jobs = [replace(job, draw=Draw()) for job in draw_jobs(random.Random(1), 6)]
    alone = {job.name: Life(both.leader, [job], random.Random(2)).play(calm=True)[job.name] for job in jobs}
    said = Life(both.leader, jobs, random.Random(3), expected=alone).play(calm=True)
    both.flush()
    assert said == alone
    assert both.own.steps == both.other.steps
    assert any(isinstance(call, calls.Step) and call.drafts for call in both.called)


@pytest.mark.parametrize("architecture", ["dense", "hybrid"])
def test_one_guesses_and_both_try_it(architecture: str, oracle: Oracle) -> None:
    both = pair(architecture, drafts=True)
    assert both.other.drafter is None
    model = Model(Facts("m", 4096, 0, None), both.leader, None, None)  # type: ignore[arg-type]
    assert play(model, architecture, 1, oracle, 6, drafted=True).differences == []
    both.flush()
    assert both.own.steps == both.other.steps
    assert any(isinstance(call, calls.Step) and call.drafts for call in both.called)


def test_one_weighs_and_both_leave_out() -> None:
    both = pair("dense", drafts=True)
    assert both.leader.can_leave_out
    assert both.leader.weigher is both.own.drafter is not None
    assert differing(both.leader, "dense", 0) == []
    both.flush()
    assert both.own.steps == both.other.steps
    assert any(isinstance(call, calls.LeaveOut) for call in both.called)


def test_what_fails_where_others_have_been_told_ends_it_all() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())

    def fail() -> None:
        raise Broken("prefill")

    both.own._engine.prompts["a"] = (1, 2, 3)  # type: ignore[attr-defined]
    both.own._engine.at["prefill", 0] = fail  # type: ignore[attr-defined]
    with pytest.raises(RankGoneError, match="Prefill has failed"):
        both.leader.prefill({"a": [1, 2]})
    assert not isinstance(RankGoneError(), Exception)


def test_a_row_that_fails_to_start_is_an_ordinary_failure_and_is_dropped_everywhere() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())
    for engine in (both.own, both.other):
        engine._engine.prompts["a"] = (1,)  # type: ignore[attr-defined]

    def fail() -> None:
        raise Broken("start")

    both.own._engine.at["start", 0] = fail  # type: ignore[attr-defined]
    with pytest.raises(Broken):
        both.leader.start("a", (1,), 1, Draw())
    both.leader.drop("a")
    both.flush()
    assert both.other._engine.decoding == {}  # type: ignore[attr-defined]


def test_cuts_are_numbered_and_let_go_of_with_the_next_call() -> None:
    both = Pair()
    both.join(ScriptedEngine(), ScriptedEngine())
    for engine in (both.own, both.other):
        scripted: ScriptedEngine = engine._engine  # type: ignore[assignment]
        scripted.shape, scripted.prompts["a"] = Shape(has_states=True), (1, 2, 3, 4)
    both.leader.prefill({"a": (1, 2, 3)})
    cuts, states = both.leader.cut("a", [(0, 2), (2, 3)], states=True)
    both.flush()
    assert states is not None
    assert dict(both.follower.kept) == {0: (1, 2), 1: (3,), 2: (1, 2, 3)}
    del cuts, states
    gc.collect()
    both.leader.drop("a")
    both.flush()
    assert both.follower.kept == {}
