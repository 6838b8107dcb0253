"""Rank of a process, from the variables that `mlx.launch` sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.hosts import HostsError
from worker.ranks.rank_info import RankInfo, find


def written(folder: Path, content: object) -> str:
    file = folder / "file.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_ring_is_met_beyond_the_first_ranks_port(tmp_path: Path) -> None:
    file = written(tmp_path, [["10.0.0.1:5000", "10.0.0.9:5001"], ["10.0.0.2:5002"]])
    environ = {"MLX_RANK": "1", "MLX_HOSTFILE": file}
    assert find(environ) == RankInfo(1, 2, "ring", "tcp://10.0.0.1:6000")
    told = environ | {"ROUNDHOUSE_RANKS": "tcp://10.0.0.1:4321"}
    assert find(told) == RankInfo(1, 2, "ring", "tcp://10.0.0.1:4321")


def test_local_ranks_meet_in_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = written(tmp_path, [["127.0.0.2:5000"], ["127.0.0.2:5001"]])
    found = find({"MLX_RANK": "1", "MLX_HOSTFILE": file})
    assert found == RankInfo(1, 2, "ring", f"ipc://{tmp_path}/roundhouse/ranks-5000-127.0.0.2.sock")
    (tmp_path / "roundhouse").chmod(0o755)
    with pytest.raises(HostsError, match="0700"):
        find({"MLX_RANK": "1", "MLX_HOSTFILE": file})


def test_a_jaccl_set_is_met_beyond_its_coordinator(tmp_path: Path) -> None:
    file = written(tmp_path, [[None, "rdma_en2"], ["rdma_en2", None]])
    environ = {"MLX_RANK": "0", "MLX_IBV_DEVICES": file, "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}
    assert find(environ) == RankInfo(0, 2, "jaccl", "tcp://10.0.0.1:6000")


def test_single_process_is_not_a_rank(tmp_path: Path) -> None:
    assert find({}) is None
    assert find({"MLX_HOSTFILE": "/nowhere"}) is None
    assert find({"MLX_RANK": "0", "MLX_HOSTFILE": written(tmp_path, "")}) is None
    assert find({"MLX_RANK": "0", "MLX_HOSTFILE": written(tmp_path, [["10.0.0.1:5000"]])}) is None


@pytest.mark.parametrize("content", ["{", "[[], []]", '[["10.0.0.1"], ["10.0.0.2"]]', "[[7], [8]]"])
def test_variables_without_sense_are_a_sentence(content: str, tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="MLX_RANK"):
        find({"MLX_RANK": "0", "MLX_HOSTFILE": written(tmp_path, content)})
    with pytest.raises(HostsError, match="MLX_RANK"):
        find({"MLX_RANK": "0"})
    file = written(tmp_path, [["10.0.0.1:5000"], ["10.0.0.2:5001"]])
    with pytest.raises(HostsError, match="there are only 2 ranks"):
        find({"MLX_RANK": "2", "MLX_HOSTFILE": file})
