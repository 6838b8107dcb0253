"""Models that `serve` runs: selection, names, memory, hostfiles and fallbacks."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from deploy.serving.commandlines import children_of
from deploy.serving.models import memory_budget, read
from deploy.serving.resolution import resolve
from deploy.supervisor.child import Child, ServedModel
from protocol.channel import encode_settings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings
from tests.deploy.weights import weights

pytestmark = pytest.mark.usefixtures("runtime_folder")

REMOVED = "it was removed: --kv-bits takes less memory for each token of a request"


def found(named: Sequence[str], text: str = "", replicas: int = 1) -> list[ServedModel]:
    errors: list[str] = []
    models = read(named, tomllib.loads(text).get("models", {}), "FILE", errors, replicas=replicas)
    assert errors == []
    return models


def wrong(text: str) -> list[str]:
    errors: list[str] = []
    read((), tomllib.loads(text)["models"], "FILE", errors)
    return errors


def test_model_is_named_by_id_folder_or_given_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights(tmp_path / "large", 1)
    models = found(("org/a", folder, "small=org/b", f"big={folder}"))
    assert [(model.name, model.model) for model in models] == [
        ("org/a", "org/a"),
        ("large", folder),
        ("small", "org/b"),
        ("big", folder),
    ]
    assert found(()) == [ServedModel(name="pocket")]
    weights(tmp_path / "a=b", 1)
    monkeypatch.chdir(tmp_path)
    assert found(("a=b",)) == [ServedModel(name="a=b", model="a=b")], "it is a folder"


def test_command_line_models_precede_and_override_those_of_the_file() -> None:
    text = '[models.a]\nmodel = "org/a"\naliases = ["x"]\nmax_running = 2\n[models.b]\nresident = true'
    first, second, third = found(("c=org/c", "a=org/other"), text)
    assert first == ServedModel(name="c", model="org/c", named=True)
    assert second == ServedModel(
        name="a", model="org/other", named=True, aliases=("x",), settings={"max_running": 2}
    )
    assert third == ServedModel(name="b", named=True, resident=True)


def test_a_name_is_valid_and_there_once() -> None:
    text = '[models.c]\naliases = ["d"]\n[models.d]\n[models."e]"]'
    assert wrong(text) == ["model 'e]': invalid name", "model 'd': duplicate name"]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ('models = "a"', ["FILE: models must be tables like [models.NAME]"]),
        ("[models]\na = 1", ["[models.a]: must be a table (from FILE)"]),
        ("[models.a]\nalias = 1", ["[models.a] alias: unknown key; did you mean aliases? (from FILE)"]),
        ("[models.a]\nmax_kv_size = 9", [f"[models.a] max_kv_size: unknown key; {REMOVED} (from FILE)"]),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_file(text: str, errors: list[str]) -> None:
    assert wrong(text) == errors


def test_each_model_has_as_many_workers_as_its_table_or_else_serve_says() -> None:
    text = '[models.two]\nmodel = "org/b"\nreplicas = 2\n[models.any]\nmodel = "org/c"\n'
    models = found(("org/a",), text, replicas=3)
    assert {model.name: model.replicas for model in models} == {"org/a": 3, "two": 2, "any": 3}
    assert [model.replicas for model in found((), replicas=4)] == [4]
    for value in ("0", "65", '"2"'):
        assert wrong(f"[models.a]\nreplicas = {value}")


def test_replicas_take_their_weights_each(tmp_path: Path) -> None:
    model = ServedModel(name="a", model=weights(tmp_path / "a", 100), replicas=3, resident=True)
    with pytest.raises(SettingsError, match="take 300 bytes"):
        memory_budget(250, [model])
    assert memory_budget(300, [model]) == 300
    alone = ServedModel(name="a", model=model.model)
    assert memory_budget(None, [alone]) is None
    assert memory_budget(None, [model]) is not None, "without a budget each replica would use all memory"


def test_an_unknown_parser_of_calls_is_refused() -> None:
    with pytest.raises(SettingsError, match="tool_call_parser: Expected command_a or"):
        worker("--tool-call-parser=bogus")


def hostfile(folder: Path, *hosts: object) -> Path:
    file = folder / "hosts.json"
    file.write_text(
        json.dumps(hosts or [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}])
    )
    return file


def worker(*argv: str, environ: Mapping[str, str] | None = None) -> Child:
    return children_of(resolve(argv, environ or {}), {})[1]


def told(child: Child) -> dict[str, object]:
    """Return the settings that are no defaults."""
    given = msgspec.json.decode(encode_settings(child.settings or WorkerSettings()))
    return {name: value for name, value in given.items() if name not in ("endpoint", "served_name")}


def test_the_worker_of_a_set_is_told_all_of_it_and_can_be_no_spare(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    child = worker("--model=m", f"--hosts={file}", "--split=tensor", "--backend=ring", "--hosts-port=5000")
    ranks = {"hosts": str(file), "split": "tensor", "backend": "ring", "hosts_port": 5000}
    assert told(child) == {"model": "m", **ranks}
    assert child.is_set
    assert not child.can_become(child)
    assert child.fallback is None


@pytest.mark.parametrize("way", ["flags", "variables"])
def test_plans_follow_one_another_in_the_order_in_which_they_are_named(way: str, tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    plans = [f"--fallback=@{file}", f"--fallback=less@{file}", "--fallback=small"]
    given = {"hosts": str(file), "draft_model": "d", "hosts_port": "5000"}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()] if way == "flags" else []
    environ = {f"ROUNDHOUSE_{name.upper()}": value for name, value in given.items() if way == "variables"}
    first = worker("--model=m", *argv, *plans, environ=environ)
    found: list[dict[str, object]] = []
    child = first.fallback
    while child is not None:
        assert (child.name, child.fallback_after_s) == (first.name, 30)
        found.append(told(child))
        child = child.fallback
    ranks = {"hosts": str(file), "hosts_port": 5000}
    assert found == [
        {"model": "m", "draft_model": "d", "stands_in": True} | ranks,
        {"model": "less", "stands_in": True} | ranks,
        {"model": "small", "stands_in": True},
    ]
    assert [first.plans, first.fallback and first.fallback.plans] == [3, 2]


@pytest.mark.parametrize(
    ("hosts", "flags", "why"),
    [
        ([{"ssh": "a"}, {"ssh": "b"}], "", "`ips` is missing for a, b"),
        (
            [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, None]}, {"ssh": "b", "rdma": ["x", None]}],
            "--backend=jaccl",
            "`rdma` of a has no device for b",
        ),
        ([], "--model=b", "hosts: with several models, set it for one"),
        ([], "--replicas=2", "hosts: a: remove replicas"),
        ([], "--fallback=b --fallback-after=60 --failover-timeout=30", "takes over after 60 s"),
        ([], "--hosts=/no/such/hosts.json", "hosts: /no/such/hosts.json"),
    ],
)
def test_set_that_cannot_work_is_refused(hosts: list[object], flags: str, why: str, tmp_path: Path) -> None:
    file = hostfile(tmp_path, *hosts)
    with pytest.raises(SettingsError, match=why):
        worker("--model=a", f"--hosts={file}", *flags.split())
