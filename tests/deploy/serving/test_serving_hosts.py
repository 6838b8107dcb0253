"""Settings of `serve` for several machines: validation, and flags of the workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.serving import serve
from deploy.supervisor.child import Child, split_models
from protocol.settings import SettingsError

pytestmark = pytest.mark.usefixtures("runtime_folder")


def hostfile(folder: Path, *hosts: object) -> Path:
    file = folder / "hosts.json"
    file.write_text(
        json.dumps(hosts or [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}])
    )
    return file


def worker(*argv: str) -> Child:
    _, children = serve.read(argv, {})
    return children[1]


def words(child: Child | None) -> list[str]:
    assert child is not None
    return [word for word in child.words if not word.startswith("--endpoint")]


def test_the_worker_of_a_set_is_told_all_of_it_and_can_be_no_spare(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    child = worker("--model=m", f"--hosts={file}", "--split=tensor", "--backend=ring", "--hosts-port=5000")
    told = [f"--hosts={file}", "--split=tensor", "--backend=ring", "--hosts-port=5000"]
    assert words(child) == ["--model=m", *told]
    assert child.is_set
    assert not child.can_become(child)
    assert child.fallback is None


def test_a_second_plan_is_one_process_alone_unless_it_has_hosts(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    child = worker("--model=m", f"--hosts={file}", "--fallback=small", "--fallback-after=7")
    assert words(child.fallback) == ["--model=small", "--served-name=m", "--stands-in"]
    assert child.fallback_after_s == 7
    both = worker("--model=m", f"--hosts={file}", "--split=tensor", f"--fallback=@{file}")
    told = ["--model=m", "--served-name=m", f"--hosts={file}", "--stands-in"]
    assert words(both.fallback) == told


def test_plans_follow_one_another_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    plans = [f"--fallback=@{file}", f"--fallback=less@{file}", "--fallback=small"]
    first = worker("--model=m", f"--hosts={file}", "--draft-model=d", "--hosts-port=5000", *plans)
    found: list[list[str]] = []
    child = first.fallback
    while child is not None:
        assert (child.name, child.fallback_after_s) == (first.name, 30)
        found.append(words(child))
        child = child.fallback
    drafts, own = "--draft-model=d", ["--served-name=m"]
    assert found == [
        ["--model=m", *own, "--hosts-port=5000", drafts, f"--hosts={file}", "--stands-in"],
        ["--model=less", *own, "--hosts-port=5000", f"--hosts={file}", "--stands-in"],
        ["--model=small", *own, "--stands-in"],
    ]
    assert [first.plans, first.fallback and first.fallback.plans] == [3, 2]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("small", ("small", None)),
        ("org/small@a/b.json", ("org/small", "a/b.json")),
        ("@three.json", (None, "three.json")),
        ("/mnt/@home/small@", ("/mnt/@home/small", None)),
    ],
)
def test_a_plan_is_a_model_hosts_or_both(word: str, named: tuple[str | None, str | None]) -> None:
    assert split_models(word) == named


def test_the_hostfile_of_each_plan_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    with pytest.raises(SettingsError, match="absent"):
        worker("--model=m", f"--hosts={file}", "--fallback=small", f"--fallback=@{tmp_path}/absent.json")


def test_streams_are_still_there_when_the_last_plan_takes_over(tmp_path: Path) -> None:
    file = f"--hosts={hostfile(tmp_path)}"
    alone = worker("--model=m", file, "--fallback=small")
    assert alone.fallback_after_s == 60
    patient = worker("--model=m", file, "--fallback=small", "--fallback=less", "--failover-timeout=600")
    assert patient.fallback_after_s == 60
    with pytest.raises(SettingsError, match="--failover-timeout"):
        worker("--model=m", file, "--fallback=small", "--fallback=less", "--fallback-after=60")


def test_the_file_says_it_of_each_model(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    config = tmp_path / "roundhouse.toml"
    config.write_text(
        f'[models.large]\nmodel = "big"\nhosts = "{file}"\nsplit = "tensor"\nfallback = "small"\n'
        'fallback_after = 30\n[models.other]\nmodel = "other"\nfallback = ["less", "small"]\n'
    )
    _, children = serve.read([f"--config={config}"], {})
    large, other = children[1:]
    assert large.is_set
    assert not other.is_set
    assert "--model=less" in words(other.fallback)
    assert other.fallback is not None
    assert "--model=small" in words(other.fallback.fallback)
    assert large.fallback_after_s == 30
    assert "--model=small" in words(large.fallback)
    assert "--stands-in" in words(large.fallback)
    assert not any("--hosts" in word or "--split" in word for word in words(large.fallback))


@pytest.mark.parametrize(
    ("hosts", "flags", "why"),
    [
        ([], [], "lists 0 hosts"),
        ([{"ips": ["10.0.0.1"]}] * 2, [], "ssh"),
        ([{"ssh": "a"}, {"ssh": "b"}], [], "`ips` is missing for a, b"),
        (
            [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}],
            ["--backend=jaccl"],
            "`rdma` of a lists 0 devices",
        ),
        (
            [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, None]}, {"ssh": "b", "rdma": ["x", None]}],
            ["--backend=jaccl"],
            "`rdma` of a has no device for b",
        ),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused_before_anything_starts(
    hosts: list[object], flags: list[str], why: str, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(hosts))
    with pytest.raises(SettingsError, match=why):
        worker("--model=m", f"--hosts={file}", *flags)


def test_of_several_models_hosts_are_said_of_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"hosts: with several models, set it for one"):
        worker("--model=a", "--model=b", f"--hosts={hostfile(tmp_path)}")
