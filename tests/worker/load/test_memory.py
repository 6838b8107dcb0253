"""Wired memory on a stand-in for MLX's Metal backend."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.models.fixtures import model_folder
from worker.load import device, memory
from worker.load.device import MemoryFit
from worker.load.load import ModelLoader
from worker.load.memory import MemoryBudget, whole_pages, wire
from worker.load.options import LoadOptions
from worker.load.source import tensor_sizes

GIB = 2**30


class Metal:
    """A Mac's memory as MLX reports it; records calls in order."""

    def __init__(self, working_set: int | None = 48 * GIB, active: int = 10 * GIB) -> None:
        self.working_set, self.active = working_set, active
        self.calls: list[object] = []

    def device_info(self) -> dict[str, int]:
        return {} if self.working_set is None else {"max_recommended_working_set_size": self.working_set}

    def get_active_memory(self) -> int:
        return self.active

    def clear_cache(self) -> None:
        self.calls.append("clear")

    def set_cache_limit(self, limit: int) -> None:
        self.calls.append(("cache", limit))

    def set_wired_limit(self, limit: int) -> None:
        self.calls.append(("wired", limit))


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Metal:
    metal = Metal()
    monkeypatch.setattr(memory, "mx", metal)
    return metal


def test_only_the_weights_are_wired_in_whole_pages_and_within_the_working_set(metal: Metal) -> None:
    expected = 10 * GIB + 2**20 + 16384 - 100
    assert whole_pages(5, [16384, 16385, 0]) == 5 + 2**20
    assert wire("weights", [4 * GIB, 100, 20000]) == expected
    assert wire("none", [1]) == 0
    assert metal.calls == ["clear", ("wired", expected)]
    assert wire("all", [1]) == 48 * GIB
    assert metal.calls[2:] == ["clear", ("wired", 48 * GIB)]
    metal.active = 48 * GIB - 5
    assert wire("weights", [4 * GIB]) == 48 * GIB


def test_nothing_is_wired_without_metal_or_before_the_load(metal: Metal) -> None:
    metal.working_set = None
    assert wire("weights", [1]) == wire("all", [1]) == 0
    assert metal.calls == []
    metal.working_set = 48 * GIB
    memory.apply(MemoryBudget(40 * GIB, 0.1))
    assert metal.calls == [("cache", 2 * GIB)]


def test_sizes_of_tensors_are_those_of_the_arrays() -> None:
    file = model_folder("dense") / "model.safetensors"
    arrays = mx.load(str(file))
    assert sorted(tensor_sizes([file, file])) == sorted(2 * [array.nbytes for array in arrays.values()])


def test_a_loader_wires_once_after_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[tuple[str, int]] = []
    monkeypatch.setattr(memory, "wire", lambda what, tensors: wired.append((what, sum(tensors))))
    progress: list[int] = []

    def load(done: int, total: int) -> None:
        assert not wired
        progress.append(done)

    folder = model_folder("dense")
    ModelLoader(str(folder), LoadOptions(wired="all")).load(load)
    assert wired == [("all", sum(tensor_sizes([folder / "model.safetensors"])))]
    assert progress


@pytest.mark.parametrize(
    ("footprint", "left"),
    [(52 * GIB, 38 * GIB), (0, 38 * GIB), (70 * GIB, 30 * GIB), (120 * GIB, 0)],
    ids=["within the headroom", "unknown", "beyond it", "beyond the limit"],
)
def test_what_macos_counts_beyond_the_headroom_is_missing_to_caches(
    footprint: int, left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "footprint_bytes", lambda: footprint)
    budget = MemoryBudget(100 * GIB, 0.12)
    assert MemoryFit("m").left_for_caches(budget, 50 * GIB, "darwin") == left
    assert MemoryFit("m").left_for_caches(budget, 50 * GIB, "linux") == 38 * GIB
    assert ("macOS counts" in caplog.text) == (left < 38 * GIB)
