"""Adapters against upstream: each row of a batch says what upstream says with that adapter alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import stream_generate
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from mlx_vlm.utils import load as load_whole

from tests.models.adapters import Recipe, make_adapter, save_adapter, upstream_layers
from tests.models.fixtures import model_folder
from tests.worker import image_questions, vision_models
from tests.worker.runner.test_engine_parity import Job, endless_tokenizer, play, play_abreast
from worker.load.adapters import read_adapter
from worker.runner.kv.capability_probe import BatchCapabilities, ProbeTarget, probe_capabilities
from worker.runner.lora import NO_ADAPTER
from worker.runner.runner import BatchEngine
from worker.values import CacheSegment, SamplingParams

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
RECIPES = (
    Recipe(1, 4.0, 1),
    Recipe(2, 3.0, 2, keys=ATTENTION),
    Recipe(3, 2.0, 3, num_layers=1),
    Recipe(8, 2.0, 4),
    Recipe(16, 1.0, 5),
    Recipe(5, 2.0, 6, dtype=mx.float16),
    Recipe(4, 2.0, 7, keys=("self_attn.o_proj", "model.embed_tokens")),
    Recipe(8, 1.0, 8, kind="dora"),
)
"""Eight adapters of different ranks, layers, types and kinds."""
EXPERTS = tuple(recipe if recipe.kind == "lora" else replace(recipe, keys=ATTENTION) for recipe in RECIPES)


def network_of(name: str) -> nn.Module:
    """Return a new network. `NAME:4bit`: quantized; `NAME:bfloat16`: in that type."""
    plain, _, kind = name.partition(":")
    network = load_model(model_folder(plain))[0]
    if kind == "4bit":
        nn.quantize(network, group_size=32, bits=4)
    elif kind:
        network.set_dtype(getattr(mx, kind))
    return network


@cache
def capabilities_of(name: str) -> BatchCapabilities:
    return probe_capabilities(ProbeTarget(network_of(name)))


def folders_of(name: str, recipes: Sequence[Recipe], tmp_path: Path) -> dict[str, Path]:
    model = model_folder(name.partition(":")[0])
    return {
        f"adapter{place}": make_adapter(model, tmp_path / str(place), recipe)
        for place, recipe in enumerate(recipes)
    }


def engine_with(name: str, folders: Mapping[str, Path]) -> BatchEngine:
    engine = BatchEngine(network_of(name), capabilities_of(name))
    for adapter, folder in folders.items():
        engine.adapters.add(adapter, read_adapter(folder, engine.adapters.layers(), 2**30).weights)
    return engine


def alone(name: str, folder: Path | None, job: Job) -> list[int]:
    """Return the tokens of upstream's generator with one adapter loaded."""
    network = network_of(name)
    if folder is not None:
        load_adapters(network, str(folder))
    network.eval()
    tokenizer = endless_tokenizer(name.partition(":")[0])
    answers = stream_generate(network, tokenizer, list(job.prompt), max_tokens=job.tokens)
    return [answer.token for answer in answers][: job.tokens]


@pytest.mark.parametrize(
    ("name", "recipes", "run"),
    [
        ("hybrid", RECIPES, play),
        ("sliding:4bit", (RECIPES[2], *RECIPES[5:]), play),  # layers, types, kinds; ranks are above
        pytest.param("dense:bfloat16", RECIPES[:3], play, marks=pytest.mark.bfloat16),
        ("qwen3_moe", EXPERTS, play_abreast),
        ("mixtral:4bit", EXPERTS[:4], play_abreast),
    ],
)
def test_rows_with_different_adapters_say_what_they_say_alone(
    name: str, recipes: Sequence[Recipe], run: Any, tmp_path: Path
) -> None:
    rng, folders = random.Random(7), folders_of(name, recipes, tmp_path)
    engine = engine_with(name, folders)
    jobs = {
        adapter: Job(
            adapter or "base",
            tuple(rng.randrange(2000) for _ in range(rng.choice([1, 5, 40, 70]))),
            rng.randint(5, 12),
        )
        for adapter in (NO_ADAPTER, *folders)
    }
    for adapter in folders:
        engine.set_adapter(adapter, adapter)
    order = [*jobs.values()]
    rng.shuffle(order)
    answers = run(engine, order, rng)
    expected = {job.name: alone(name, folders.get(adapter), job) for adapter, job in jobs.items()}
    assert answers == expected
    assert len({tuple(said[:4]) for said in expected.values()}) > len(recipes) // 2, "adapters change answers"


def test_drafts_copies_and_restored_rows_keep_their_adapter(tmp_path: Path) -> None:
    """Two rows of one prompt, with and without an adapter: forked, restored, resumed and drafted for."""
    folders = folders_of("hybrid", RECIPES[3:4], tmp_path)
    engine, prompt = engine_with("hybrid", folders), tuple(range(3, 60))
    jobs = {name: Job(name or "base", prompt, 12) for name in ("", "adapter0")}
    expected = {name: alone("hybrid", folders.get(name), job) for name, job in jobs.items()}
    engine.set_adapter("one", "adapter0")
    engine.prefill({"one": prompt[:30]})
    engine.fork("one", "two")
    (columns,), states = engine.copy_cache("one", [(0, 30)], states=True)
    engine.prefill({"two": prompt[30:-1], "base": prompt[:-1]})
    engine.drop("one")
    engine.set_adapter("one", "adapter0")
    assert states is not None
    engine.restore("one", [CacheSegment(columns.payload, 0, 30, 30)], states.payload)
    answered = expected["adapter0"][:4]
    engine.prefill({"one": (*prompt[30:], *answered[:-1])})
    engine.start("one", (*prompt, *answered), len(prompt), SamplingParams())
    for row in ("two", "base"):
        engine.start(row, prompt, len(prompt), SamplingParams())
    given = {"one": [*answered], "two": list[int](), "base": list[int]()}
    wanted = {row: expected["" if row == "base" else "adapter0"] for row in given}
    turn = 0
    while any(len(said) < 12 for said in given.values()):
        turn += 1
        drafts = {row: [*wanted[row][len(said) :][: turn % 3], 7] for row, said in given.items() if turn % 4}
        step = engine.step(drafts)
        for row, token in step.tokens.items():
            given[row] += [token, *(drawn.token for drawn in step.further.get(row, ()))]
    assert {row: said[:12] for row, said in given.items()} == wanted


def test_adapters_come_and_go_while_rows_decode(tmp_path: Path) -> None:
    """Without adapters, the layers are the plain ones again."""
    folders = folders_of("qwen3_moe", EXPERTS[:3], tmp_path)
    engine, prompt = engine_with("qwen3_moe", {"adapter0": folders["adapter0"]}), (5, 6, 7, 8, 9)
    classes = [type(module) for module in network_of("qwen3_moe").modules()]
    expected = {name: alone("qwen3_moe", folders.get(name), Job("x", prompt, 24)) for name in ("", *folders)}
    answers: dict[str, list[int]] = {}

    def begin(adapter: str) -> None:
        if adapter:
            engine.set_adapter(adapter, adapter)
        engine.prefill({adapter: prompt[:-1]})
        engine.start(adapter, prompt, len(prompt), SamplingParams())
        answers[adapter] = []

    def run(steps: int) -> None:
        for _ in range(steps):
            for row, token in engine.step().tokens.items():
                answers[row].append(token)

    begin("")
    begin("adapter0")
    run(6)
    for name in ("adapter1", "adapter2"):
        engine.adapters.add(name, read_adapter(folders[name], engine.adapters.layers(), 2**30).weights)
        begin(name)
    held = engine.adapters.nbytes
    run(8)
    engine.drop("adapter0")
    engine.adapters.remove("adapter0")
    assert 0 < engine.adapters.nbytes < held
    run(8)
    for row, said in answers.items():
        assert said == expected[row][: len(said)], row
        assert len(said) > 10
        engine.drop(row)
    for name in ("adapter1", "adapter2"):
        engine.adapters.remove(name)
    assert [type(module) for module in engine._model.modules()] == classes
    assert engine.adapters.nbytes == 0


def test_rows_with_images_are_changed_by_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "gemma3-eyes"
    recipes = (NO_ADAPTER, Recipe(4, 2.0, 1), Recipe(8, 3.0, 2))
    oracles, engine = {}, vision_models.loaded(model).engine
    assert isinstance(engine, BatchEngine)
    for recipe in recipes[1:]:
        network, processor = load_whole(str(image_questions.folder_of(model)))[:2]
        assert isinstance(recipe, Recipe)
        upstream_layers(network.language_model, recipe)
        folder = save_adapter(network, tmp_path / str(recipe.seed), recipe)
        network.load_weights(str(folder / "adapters.safetensors"), strict=False)
        network.eval()
        processor.tokenizer.stopping_criteria = lambda token: False
        oracles[recipe] = network, processor
        weights = read_adapter(folder, engine.adapters.layers(), 2**30).weights
        engine.adapters.add(str(recipe.seed), weights)
    expected, jobs = {}, vision_models.jobs_of(model, 1)
    for place, job in enumerate(jobs):
        recipe = recipes[place % 3]
        if isinstance(recipe, Recipe):
            engine.set_adapter(job.name, str(recipe.seed))
            with monkeypatch.context() as patched:
                patched.setattr(image_questions, "upstream", lambda name, found=oracles[recipe]: found)
                expected[job.name] = image_questions.answer(model, job.question, job.tokens)
        else:
            expected[job.name] = job.expected(model)
    try:
        assert vision_models.play(engine, jobs, random.Random(1)) == expected
    finally:
        engine.adapters.remove("1")
        engine.adapters.remove("2")
