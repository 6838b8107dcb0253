"""Loading a model: its properties, whether it fits into memory, and the compiler that it uses."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from protocol.types import Exactness
from tests.models.fixtures import model_folder
from tests.worker.folders import copied, failure, nothing
from worker.core.scheduler import SchedulerConfig
from worker.gateway.model_thread import ready_of
from worker.interfaces import InsufficientMemoryError, Model, ModelError
from worker.load import capabilities, exactness, load, memory, vision, weights
from worker.load.config import CONTEXT_FALLBACK_TOKENS, read_config
from worker.load.exactness import UNMEASURED, ExactnessUse
from worker.load.load import ModelLoader
from worker.load.memory import AvailableMemory
from worker.load.options import LoadOptions
from worker.process.startup_timer import StartupTimer
from worker.runner.runner import BatchEngine
from worker.values import SamplingParams


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_folder_is_loaded_warmed_up_and_described(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "GROUP_BYTES", 200_000)
    reports: list[tuple[int, int]] = []
    loader = ModelLoader(str(model_folder(name)))
    assert loader.name == name
    with caplog.at_level(logging.INFO):
        model = loader.load(lambda done, total: reports.append((done, total)))
    facts = model.info
    assert facts.name == name
    assert facts.context_length == {"dense": 4096, "hybrid": 32768}[name]
    assert 400_000 < facts.parameters < 800_000
    assert facts.batched
    assert not facts.capabilities.images
    assert facts.capabilities.tools
    assert model.engine.cache_bytes() == 0
    done = [done for done, _ in reports]
    assert done[0] == 0
    assert done == sorted(done)
    assert len(done) > 4  # weights are evaluated and reported in groups
    assert reports[-1] == (reports[-1][1], reports[-1][1])
    pattern = (
        rf"loaded {name}: text model, \w+, \d+\.\dK parameters, \d\.\d MB, [\d.]+ GB left for caches, "
        r"context \d+"
    )
    assert any(re.fullmatch(pattern, line) for line in caplog.messages)


def test_load_is_timed_and_proofs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = StartupTimer()
    folder = str(model_folder("qwen3_5-eyes"))
    first = ModelLoader(folder, LoadOptions(probe_folder=tmp_path), timer=timer).load(nothing)
    parts = ["start", "imports", "images", "weights", "trial", "tokenizer", "warm-up", "fingerprint"]
    assert list(timer.seconds) == parts
    assert isinstance(first, Model)
    monkeypatch.setattr(capabilities, "probe_capabilities", None)  # must not be called
    monkeypatch.setattr(vision, "probe_images", None)
    second = ModelLoader(folder, LoadOptions(probe_folder=tmp_path)).load(nothing)
    assert isinstance(second, Model)
    assert second.info.batched
    assert second.info.capabilities.images
    assert second.engine.shape == first.engine.shape is not None


@pytest.mark.parametrize(
    ("changes", "tokenizer", "length"),
    [
        ({"max_position_embeddings": 1234}, {}, 1234),
        ({"max_position_embeddings": None, "n_positions": 512}, {}, 512),
        ({"max_position_embeddings": None}, {"model_max_length": 2048}, 2048),
        ({"max_position_embeddings": None}, {}, CONTEXT_FALLBACK_TOKENS),
    ],
)
def test_the_context_length_is_found_where_it_stands(
    tmp_path: Path, changes: dict[str, Any], tokenizer: dict[str, Any], length: int
) -> None:
    folder = copied(tmp_path, **changes)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert read_config(folder, "x").context_length == length


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("dense")
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("loaded all the same"))
    message = failure(folder, memory_limit_bytes=int(1.05 * size))
    assert "its weights take 1.7 MB, and of 1.8 MB only 1.6 MB may be used" in message
    assert "smaller" in message
    assert "its weights" in failure(folder, memory_limit_bytes=2 * size, memory_headroom=0.6)
    monkeypatch.setattr(memory, "read_memory", lambda: AvailableMemory(total=1000, free=1000))
    assert "0.0 MB" in failure(folder)


def memory_becomes_free(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """Patch the free memory found by successive queries; the last value repeats."""
    found = iter(free)
    monkeypatch.setattr(memory, "MEMORY_POLL_S", 0.0)
    monkeypatch.setattr(memory, "read_memory", lambda: AvailableMemory(2**30, next(found, free[-1])))


def test_a_load_waits_for_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    memory_becomes_free(monkeypatch, 0, 1000, 2000, 2**28)
    model = ModelLoader(str(model_folder("dense"))).load(nothing)
    assert model.info.cache_bytes_max is not None
    assert model.info.cache_bytes_max < 2**28
    assert caplog.text.count("waiting for memory") == 1


def test_a_model_without_room_is_not_loaded_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_becomes_free(monkeypatch, 1000)
    monkeypatch.setattr(memory, "MEMORY_WAIT_S", 0.01)
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("loaded all the same"))
    with pytest.raises(InsufficientMemoryError, match="Close other programs"):
        ModelLoader(str(model_folder("dense"))).load(nothing)


APPLE = {"max_recommended_working_set_size": 48 * 2**30}
NVIDIA = {"total_memory": 80 * 2**30, "free_memory": 30 * 2**30}


@pytest.mark.parametrize(
    ("device", "wired", "found"),
    [
        (APPLE, 4, AvailableMemory(48 * 2**30, 48 * 2**30)),
        (APPLE, 40, AvailableMemory(48 * 2**30, 24 * 2**30)),
        (NVIDIA, 0, AvailableMemory(80 * 2**30, 30 * 2**30)),
        ({}, 0, AvailableMemory(64 * 2**30, 50 * 2**30)),
    ],
    ids=["Apple", "Apple with much wired", "NVIDIA", "no GPU"],
)
def test_available_memory_depends_on_the_machine(
    device: dict[str, int], wired: int, found: AvailableMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=64 * 2**30, available=50 * 2**30, wired=wired * 2**30)
    real = memory.read_memory()
    assert 2**20 < real.free <= real.total
    monkeypatch.setattr(memory.mx, "device_info", lambda: device)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    assert memory.read_memory() == found


def test_a_model_that_just_fits_is_loaded() -> None:
    folder = model_folder("dense")
    size = (folder / "model.safetensors").stat().st_size
    for limit in ("memory_limit_bytes", "memory_budget"):
        model = ModelLoader(str(folder), LoadOptions(**{limit: size + 7}, memory_headroom=0.0)).load(nothing)
        assert model.info.cache_bytes_max == 7
    assert "its weights" in failure(folder, memory_budget=size - 1)


_LOAD_AND_STEP = """
import logging, os, sys
logging.basicConfig(level="INFO", format="%(message)s")
import mlx.core as mx
mx.set_default_device(mx.cpu)  # a GPU's kernels need no C++ compiler
from worker.values import SamplingParams
from worker.load.exactness import UNMEASURED, ExactnessUse
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
for path in sys.argv[2:]:
    os.environ["PATH"] = path
    mx.enable_compile()
    engine = ModelLoader(sys.argv[1]).load(lambda done, total: None).engine
    engine.start("row", [5], 1, SamplingParams())
    print([engine.step().tokens.get("row") for _ in range(9)][1:])
"""


def run_with_paths(paths: Sequence[str], temporary: Path) -> tuple[list[str], str]:
    """Load and run the sliding model, which has compiled functions, with each PATH, in one process, whose
    imports take longer than all else. Return what it prints, and its log."""
    temporary.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", _LOAD_AND_STEP, str(model_folder("sliding")), *paths],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return ran.stdout.splitlines(), ran.stderr


@pytest.mark.timeout(600)  # a process loads a model, which takes long on a busy machine
def test_a_model_runs_without_a_working_compiler(tmp_path: Path) -> None:
    none, broken = tmp_path / "none", tmp_path / "broken"
    for folder in (none, broken):
        folder.mkdir()
    compiler = broken / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no headers >&2\nexit 1\n')
    compiler.chmod(0o755)
    answers, log = run_with_paths([str(none), str(broken)], tmp_path / "temporary")
    assert 0 <= log.find("no C++ compiler") < log.find("compiler does not work")
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        engine = ModelLoader(str(model_folder("sliding"))).load(nothing).engine
        engine.start("row", [5], 1, SamplingParams())
        assert answers == [str([engine.step().tokens.get("row") for _ in range(9)][1:])] * 2
    finally:
        mx.set_default_device(device)


def test_exact_limits_the_passes_of_the_engine_and_tells_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loaded(use: ExactnessUse) -> Model:
        folder = str(model_folder("dense"))
        model = ModelLoader(folder, LoadOptions(exactness=use, exactness_folder=tmp_path / "exactness")).load(
            nothing
        )
        assert isinstance(model, Model)
        assert isinstance(model.engine, BatchEngine)
        assert ready_of("w", model.info, SchedulerConfig(rows_max=16)).exactness == model.info.exactness
        assert model.info.batched == model.engine.capabilities.together
        return model

    assert loaded("none").info.exactness is None
    unmeasured = loaded("limits")
    assert unmeasured.info.exactness == UNMEASURED
    assert not unmeasured.info.batched
    assert "`roundhouse doctor --model` measures it" in caplog.text
    found = Exactness(rows_max=5, draft_tokens_max=0)
    with monkeypatch.context() as patch:
        patch.setattr(exactness, "measure", lambda engine, limits: found)
        assert loaded("measure").info.exactness == found
    caplog.clear()
    limited = loaded("limits")
    assert limited.info.exactness == found
    assert limited.info.batched
    assert not limited.engine.capabilities.padded
    assert not limited.engine.capabilities.ahead
    assert "doctor" not in caplog.text


def test_exact_refuses_a_draft_model_whose_drafts_are_not_verified() -> None:
    folder = str(model_folder("dense"))
    with pytest.raises(ModelError, match="leave --exact or --draft-model out"):
        ModelLoader(folder, LoadOptions(draft_model=folder, exactness="limits")).load(nothing)
