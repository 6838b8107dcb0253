"""Model fingerprints: whatever tensor a fine-tune has changed, its stored prefixes are its own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from worker.load.source import fingerprint

SIZES = {
    "embed": 300_000,
    "layers.0.q": 40_000,
    "layers.0.v": 9_000,
    "layers.0.norm": 64,
    "layers.1.q": 40_000,
}


def _written(folder: Path, changed: str = "") -> str:
    folder.mkdir()
    arrays = {name: mx.full((size,), 1.0 + (name == changed)) for name, size in SIZES.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text("{}")
    return fingerprint(folder / "config.json", [folder / "model.safetensors"], {})


@pytest.mark.parametrize("changed", SIZES)
def test_a_change_of_any_tensor_changes_it(changed: str, tmp_path: Path) -> None:
    base = _written(tmp_path / "base")
    assert _written(tmp_path / "same") == base
    assert _written(tmp_path / "tuned", changed) != base
