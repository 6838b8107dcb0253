"""Probe results are cached per model, library versions, device and code."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.fixtures import model_folder
from worker.load.probes import cache
from worker.load.probes.cache import FILES_MAX, ProbeCache, key_of
from worker.load.source import WEIGHTS
from worker.runner.kv.capability_probe import BatchCapabilities

KEY = "0f" * 16
_KEY = KEY.encode()
PROVEN = BatchCapabilities(True, True, True, True, True, True, True, True)


def not_again() -> BatchCapabilities:
    raise AssertionError("the result is in the cache")


def kept(folder: Path) -> Path:
    """Return the file of a probe result."""
    assert ProbeCache(folder).capabilities(KEY, lambda: PROVEN) == PROVEN
    return folder / f"{KEY}.json"


def test_cached_probe_result_is_reused(tmp_path: Path) -> None:
    kept(tmp_path / "trials")
    assert ProbeCache(tmp_path / "trials").capabilities(KEY, not_again) == PROVEN
    assert (tmp_path / "trials").stat().st_mode & 0o777 == 0o700


REFUSED = (
    BatchCapabilities(False, False, True, True, False, True, False, False, ("cannot be batched: too much",)),
    BatchCapabilities(True, True, True, False, True, True, True, True),
    BatchCapabilities(True, True, True, True, False, True, True, False),
    BatchCapabilities(True, True, True, True, True, True, True, True, ("a reason",)),
)


@pytest.mark.parametrize("refused", REFUSED)
def test_negative_probe_result_is_not_cached(tmp_path: Path, refused: BatchCapabilities) -> None:
    assert ProbeCache(tmp_path).capabilities(KEY, lambda: refused) == refused
    assert ProbeCache(tmp_path).capabilities(KEY, lambda: PROVEN) == PROVEN


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300)
    | st.sampled_from(
        [
            b"{}",
            b'{"key":"other","proven":{"together":true,"padded":true,"restorable":true,"cut":true}}',
            b'{"key":"%b","proven":{"together":true,"padded":true,"restorable":true,"cut":false}}' % _KEY,
        ]
    )
)
def test_a_file_that_is_damaged_or_anothers_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(content)
    proofs: list[int] = []

    def prove() -> BatchCapabilities:
        proofs.append(1)
        return PROVEN

    assert ProbeCache(tmp_path).capabilities(KEY, prove) == PROVEN
    assert proofs


def test_of_too_many_the_eldest_go(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 3):
        file = tmp_path / f"{number}.json"
        file.write_text("{}")
        os.utime(file, (number, number))
    kept(tmp_path)
    left = {file.name for file in tmp_path.glob("*.json")}
    assert len(left) == FILES_MAX
    assert not {f"{number}.json" for number in range(4)} & left
    assert f"{KEY}.json" in left


def key(folder: Path, network: nn.Module | None = None) -> str:
    return key_of(folder, folder.glob(WEIGHTS), network or nn.Module())


def test_the_key_has_all_that_a_proof_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("dense"), folder)
    keys = [key(folder)]
    assert key(folder) == keys[0]
    keys.append(key(folder, nn.Linear(1, 1)))
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    keys.append(key(folder))
    weights = next(folder.glob(WEIGHTS))
    weights.write_bytes(weights.read_bytes() + b"\0")
    keys.append(key(folder))
    for library in cache._LIBRARIES:
        with monkeypatch.context() as patched:
            versions = {name: metadata.version(name) for name in cache._LIBRARIES}
            patched.setattr(metadata, "version", (versions | {library: "0"}).__getitem__)
            keys.append(key(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    keys.append(key(folder))
    monkeypatch.setattr(cache, "_sources", lambda package: [])
    keys.append(key(folder))
    assert len(set(keys)) == len(keys)
