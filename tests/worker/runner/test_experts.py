"""Experts from disk: the tokens of upstream, with a quarter of the experts in memory."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from protocol.common.expert_plan import ExpertPlan, plan_all, plan_experts
from tests.models.fixtures import model_folder
from tests.models.mixtures import make_mixture
from tests.oracle import Oracle
from tests.worker.folders import failure, nothing
from worker.interfaces import Model
from worker.load.experts import attach
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.runner.experts import ExpertFileError, ResidentExperts, WeightFile
from worker.values import SamplingParams

PROMPTS = [tuple((7 * row + 31 * place) % 1900 + 1 for place in range(9 + 13 * row)) for row in range(4)]
TOKENS = 12


def plan_of(folder: Path, share: float) -> ExpertPlan:
    plan = plan_experts(files := sorted(folder.glob("*.safetensors")), int(share * plan_all(files).all_bytes))
    assert plan is not None
    return plan


def streamed(folder: Path, share: float = 0.25) -> tuple[Model, ModelLoader]:
    loader = ModelLoader(str(folder), LoadOptions(experts_memory=plan_of(folder, share).resident_bytes))
    model = loader.load(nothing)
    assert isinstance(model, Model)
    return model, loader


def answers(engine: Any, prompts: dict[str, Sequence[int]], drafts: dict[str, list[int]]) -> list[list[int]]:
    """Return the tokens of rows that decode together. `drafts`: what is drafted in the second step."""
    for row, prompt in prompts.items():
        engine.prefill({row: prompt[:7]})
        engine.prefill({row: prompt[7:-1]})
        engine.start(row, prompt, len(prompt), SamplingParams())
    found: dict[str, list[int]] = {row: [] for row in prompts}
    engine.step()
    waiting = dict(drafts)
    while any(len(tokens) < TOKENS for tokens in found.values()):
        step = engine.step(waiting)
        waiting = {}
        for row, token in step.tokens.items():
            found[row] += [token, *(drawn.token for drawn in step.further.get(row, ()))]
    for row in prompts:
        engine.drop(row)
    return [tokens[:TOKENS] for tokens in found.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a mixture, which must only be read."""
    return make_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture") / "m")


@pytest.mark.parametrize(("kind", "bits"), [("qwen3_moe", None), ("mixtral", 4), ("deepseek_v3", None)])
def test_few_experts_answer_as_upstream(kind: str, bits: int | None, tmp_path: Path, oracle: Oracle) -> None:
    folder = make_mixture(kind, tmp_path / kind, bits=bits)
    oracle.ask(folder, [{"tokens": list(prompt), "max_tokens": TOKENS} for prompt in PROMPTS])
    model, loader = streamed(folder)
    right = [answer["tokens"] for answer in oracle.hear()]
    assert len({token for tokens in right for token in tokens}) > TOKENS, "answers of one token show nothing"
    rows = {str(row): prompt for row, prompt in enumerate(PROMPTS)}
    alone = [answers(model.engine, {row: prompt}, {})[0] for row, prompt in rows.items()]
    assert alone == right
    assert answers(model.engine, rows, {}) == right
    drafts = {row: tokens[:4] for row, tokens in zip(rows, right, strict=True)}
    if bits is None:  # quantized, passes of several tokens round differently in upstream, too
        assert answers(model.engine, rows, drafts) == right
    status = loader.device_memory().experts
    assert status is not None
    assert (status.slots, status.experts) == (4, 16)
    assert 0 < status.read < status.wanted
    assert status.read_bytes > 0


def test_a_pass_that_is_not_waited_for_keeps_its_experts(tmp_path: Path) -> None:
    """Two passes are built before either is evaluated; the second reads other experts into the slots."""
    folder = make_mixture("mixtral", tmp_path / "m", layers=1)
    whole: Any = load_model(folder)[0]
    part: Any = load_model(folder, lazy=True)[0]
    attach(plan_of(folder, 0.25), part)
    inputs = [mx.array([[token]]) for token in range(1, 40)]
    found = [part(each) for each in inputs]
    assert all(mx.array_equal(logits, whole(each)) for logits, each in zip(found, inputs, strict=True))


def test_the_memory_of_the_experts_that_are_not_there_is_left_for_caches(folder: Path) -> None:
    plan = plan_of(folder, 0.25)
    own = {"memory_limit_bytes": 2**30, "memory_headroom": 0.0}
    whole = ModelLoader(str(folder), LoadOptions(**own)).load(nothing).info
    part = ModelLoader(str(folder), LoadOptions(experts_memory=plan.resident_bytes, **own)).load(nothing).info
    assert whole.cache_bytes_max is not None
    assert part.cache_bytes_max == whole.cache_bytes_max + plan.saved_bytes
    assert part.parameters == whole.parameters
    assert part.fingerprint == whole.fingerprint
    least = sum(file.stat().st_size for file in folder.glob("*.safetensors")) - plan.saved_bytes
    assert "its weights" in failure(folder, memory_limit_bytes=least + 7, memory_headroom=0.0)
    fits = {"memory_limit_bytes": least + 7, "memory_headroom": 0.0}
    loader = ModelLoader(str(folder), LoadOptions(experts_memory=plan.resident_bytes, **fits))
    assert isinstance(loader.load(nothing), Model)


def test_the_peak_of_the_memory_is_that_of_the_experts_in_memory(tmp_path: Path) -> None:
    """Loading included."""
    folder = make_mixture("qwen3_moe", tmp_path / "m", moe_intermediate_size=512)
    plan = plan_of(folder, 0.25)
    assert plan.saved_bytes > 7 * 10**6

    def peak(limit: int | None) -> int:
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        answers(
            ModelLoader(str(folder), LoadOptions(experts_memory=limit)).load(nothing).engine,
            {"a": range(1, 200)},
            {},
        )
        return mx.get_peak_memory() - before

    assert peak(plan.resident_bytes) < peak(None) - 0.8 * plan.saved_bytes


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def _touch(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1000, os.SEEK_END)
        opened.write(b"\0" * 1000)
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("damage", [_truncate, _touch])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    own = shutil.copytree(folder, tmp_path / "m")
    file, limit = own / "model.safetensors", plan_of(own, 0.25).resident_bytes
    model, _ = streamed(own)
    assert answers(model.engine, {"a": PROMPTS[1]}, {})
    damage(file)
    with pytest.raises(ExpertFileError, match=r"model\.safetensors has changed"):
        answers(model.engine, {"a": PROMPTS[3]}, {})
    model.engine.reset()
    if damage is _truncate:
        assert f"{file} is truncated" in failure(own, experts_memory=limit)


def test_a_failed_read_leaves_no_wrong_expert(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = streamed(folder)
    right = answers(model.engine, {"a": PROMPTS[1]}, {})
    read, calls = WeightFile.read_into, 0

    def fails(self: WeightFile, buffer: memoryview, at: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            buffer[:] = b"\x7f" * len(buffer)
            raise ExpertFileError("broken")
        read(self, buffer, at)

    for _ in range(2):
        monkeypatch.setattr(WeightFile, "read_into", fails)
        with pytest.raises(ExpertFileError):
            answers(model.engine, {"a": PROMPTS[3]}, {})
        model.engine.reset()
        monkeypatch.setattr(WeightFile, "read_into", read)
        assert answers(model.engine, {"a": PROMPTS[1]}, {}) == right


def test_a_slow_file_is_a_pause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader = streamed(folder)
    right = answers(model.engine, {"a": PROMPTS[1]}, {})
    read = os.preadv

    def slow(file: int, buffers: list[memoryview], at: int) -> int:
        time.sleep(0.001)
        return read(file, [buffers[0][:1000]], at)  # and in parts

    monkeypatch.setattr(os, "preadv", slow)
    before = loader.device_memory().experts
    assert answers(model.engine, {"a": PROMPTS[1]}, {}) == right
    after = loader.device_memory().experts
    assert before is not None
    assert after is not None
    assert after.read_s > before.read_s


def test_a_file_that_ends_while_read_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"0123456789")
    file = WeightFile(path)
    buffer = memoryview(bytearray(4))
    file.read_into(buffer, 2)
    assert bytes(buffer) == b"2345"
    with pytest.raises(ExpertFileError, match="w is truncated"):
        file.read_into(buffer, 8)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ExpertFileError, match="w cannot be read: Input/output error"):
        file.read_into(buffer, 0)


def test_where_experts_cannot_be_read_from_disk_the_load_is_refused() -> None:
    assert "no stacked experts" in failure(model_folder("dense"), experts_memory=2**20)
    assert "generates no text" in failure(model_folder("dense"), experts_memory=2**20, task="embed")
    assert "set at least that" in failure(model_folder("qwen3_moe"), experts_memory=10)
    assert "only with --text-only" in failure(model_folder("qwen3_5-eyes"), experts_memory=2**20)
    eyes = model_folder("idefics3-eyes")
    assert "only mlx-vlm implements it" in failure(eyes, experts_memory=2**20, text_only=True)


@given(st.integers(1, 6), st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), max_size=40))
def test_what_is_wanted_is_in_a_slot_of_its_own(slots: int, passes: list[set[int]]) -> None:
    resident = ResidentExperts(10, slots)
    holds: dict[int, int] = {}
    for wanted in passes:
        part = sorted(wanted)[:slots]
        unread = [expert for expert, _ in resident.choose(part)]  # as if their reads had failed
        missing = resident.choose(part)
        assert [expert for expert, _ in missing] == unread
        for expert, slot in missing:
            assert holds.get(slot) not in part, "a wanted expert is never evicted"
            holds[slot] = expert
            resident.fill(expert, slot)
        assert all(holds[int(resident.slot_of[expert])] == expert for expert in part)
        here = [expert for expert in range(10) if resident.slot_of[expert] >= 0]
        assert len({int(resident.slot_of[expert]) for expert in here}) == len(here) <= slots
