"""Probe results are kept per model, versions and device."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

import mlx.nn as nn
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.fixtures import model_folder
from worker.load import probe_results
from worker.load.probe_results import FILES_MAX, ProbeResults, key_of
from worker.load.source import WEIGHTS
from worker.runner.kv.capability_probe import BatchCapabilities

KEY = "0f" * 16
PROVEN = BatchCapabilities(True, True, True, True, True, True, True, True)


def kept(folder: Path) -> BatchCapabilities | None:
    return ProbeResults(folder).read(KEY, BatchCapabilities)


def test_a_result_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    ProbeResults(tmp_path / "trials").write(KEY, PROVEN)
    assert kept(tmp_path / "trials") == PROVEN
    assert (tmp_path / "trials").stat().st_mode & 0o777 == 0o700
    ProbeResults(None).write(KEY, PROVEN)
    assert ProbeResults(None).read(KEY, BatchCapabilities) is None


_ANOTHERS = msgspec.json.encode(("other", PROVEN))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.sampled_from([b"{}", b'["%b",{}]' % KEY.encode(), _ANOTHERS]))
def test_a_file_that_is_damaged_or_anothers_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(content)
    assert kept(tmp_path) is None


def test_of_too_many_the_eldest_go(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 3):
        file = tmp_path / f"{number}.json"
        file.write_text("{}")
        os.utime(file, (number, number))
    ProbeResults(tmp_path).write(KEY, PROVEN)
    left = {file.name for file in tmp_path.glob("*.json")}
    assert len(left) == FILES_MAX
    assert not {f"{number}.json" for number in range(4)} & left
    assert f"{KEY}.json" in left


def key(folder: Path, network: nn.Module | None = None) -> str:
    return key_of(folder, folder.glob(WEIGHTS), network or nn.Module())


def test_the_key_has_all_that_a_result_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for library in probe_results.LIBRARIES:
        with monkeypatch.context() as patched:
            versions = {name: metadata.version(name) for name in probe_results.LIBRARIES}
            patched.setattr(metadata, "version", (versions | {library: "0"}).__getitem__)
            keys.append(key(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    keys.append(key(folder))
    assert len(set(keys)) == len(keys)
