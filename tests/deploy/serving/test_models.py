"""Models that `serve` runs: selection, names, memory, hostfiles and fallbacks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from deploy.serving import serve
from deploy.serving.commandlines import worker_flags
from deploy.serving.models import memory_budget, read
from deploy.serving.settings import ServeSettings
from deploy.supervisor.child import Child, ServedModel, Setting
from protocol.settings import reader as settings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings
from tests.deploy.conftest import config
from tests.deploy.weights import weights

pytestmark = pytest.mark.usefixtures("runtime_folder")

REMOVED = "it was removed: --kv-bits takes less memory for each token of a request"


def found(named: Sequence[str], file: str | None) -> list[ServedModel]:
    errors: list[str] = []
    models = read(named, file, errors)
    assert errors == []
    return models


def wrong(file: str) -> list[str]:
    errors: list[str] = []
    read((), file, errors)
    return errors


def test_model_is_named_by_id_folder_or_given_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights(tmp_path / "large", 1)
    models = found(("org/a", folder, "small=org/b", f"big={folder}"), None)
    assert [(model.name, model.model) for model in models] == [
        ("org/a", "org/a"),
        ("large", folder),
        ("small", "org/b"),
        ("big", folder),
    ]
    assert found((), None) == [ServedModel(name="pocket")]
    weights(tmp_path / "a=b", 1)
    monkeypatch.chdir(tmp_path)
    assert found(("a=b",), None) == [ServedModel(name="a=b", model="a=b")], "it is a folder"


def test_command_line_models_precede_and_override_those_of_the_file(tmp_path: Path) -> None:
    file = config(
        tmp_path, '[models.a]\nmodel = "org/a"\naliases = ["x"]\nmax_running = 2\n[models.b]\nresident = true'
    )
    first, second, third = found(("c=org/c", "a=org/other"), file)
    assert first == ServedModel(name="c", model="org/c", named=True)
    assert second == ServedModel(
        name="a", model="org/other", named=True, aliases=("x",), settings={"max_running": 2}
    )
    assert third == ServedModel(name="b", named=True, resident=True)


def test_a_name_is_valid_and_there_once(tmp_path: Path) -> None:
    file = config(tmp_path, '[models.c]\naliases = ["d"]\n[models.d]\n[models."e]"]')
    assert wrong(file) == ["model 'e]': invalid name", "model 'd': duplicate name"]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ('models = "a"', ["FILE: models must be tables like [models.NAME]"]),
        ("[models]\na = 1", ["[models.a]: must be a table (from FILE)"]),
        ("[models.a]\nalias = 1", ["[models.a] alias: unknown key; did you mean aliases? (from FILE)"]),
        ("[models.a]\nmax_kv_size = 9", [f"[models.a] max_kv_size: unknown key; {REMOVED} (from FILE)"]),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_file(text: str, errors: list[str], tmp_path: Path) -> None:
    file = config(tmp_path, text)
    assert wrong(file) == [error.replace("FILE", file) for error in errors]


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 2**63),
    st.sampled_from([0.0, 0.5, 1.5, 8.0, 1e30, math.inf, math.nan]),
    st.sampled_from(["", "8", "0.5", "-1", "2GiB", "8.0", "much", "/x", "~/x", "text", "true", "inf"]),
)


@settings_of_hypothesis(max_examples=60)
@given(st.sampled_from(sorted(WorkerSettings.__struct_encode_fields__)), VALUES)
def test_a_value_is_refused_just_when_the_worker_would_refuse_its_flag(name: str, value: Setting) -> None:
    try:
        told = worker_flags(ServeSettings(), ServedModel(name="a", settings={name: value}))
        settings.read(WorkerSettings, "worker", told, {}, program="", about="")
        taken = True
    except SettingsError:
        taken = False
    assert (settings.refusal(WorkerSettings, name, value) is None) == taken


def test_each_model_has_as_many_workers_as_its_table_or_else_serve_says(tmp_path: Path) -> None:
    file = config(tmp_path, '[models.two]\nmodel = "org/b"\nreplicas = 2\n[models.any]\nmodel = "org/c"\n')
    models = read(("org/a",), file, [], replicas=3)
    assert {model.name: model.replicas for model in models} == {"org/a": 3, "two": 2, "any": 3}
    assert [model.replicas for model in read((), None, [], replicas=4)] == [4]
    for value in ("0", "65", '"2"'):
        assert wrong(config(tmp_path, f"[models.a]\nreplicas = {value}"))


def test_replicas_take_their_weights_each_and_share_the_budget(tmp_path: Path) -> None:
    model = ServedModel(name="a", model=weights(tmp_path / "a", 100), replicas=3, resident=True)
    with pytest.raises(SettingsError, match="take 300 bytes"):
        memory_budget(250, [model])
    assert memory_budget(300, [model]) == 300
    assert "--memory-budget=100" in worker_flags(ServeSettings(memory_budget=300), model)
    alone = ServedModel(name="a", model=model.model)
    assert memory_budget(None, [alone]) is None
    assert memory_budget(None, [model]) is not None, "without a budget each replica would use all memory"


def test_a_named_parser_reaches_the_worker_and_an_unknown_one_nobody() -> None:
    assert "--reasoning-parser=granite" in worker("--reasoning-parser=granite").argv
    with pytest.raises(SettingsError, match="tool_call_parser: Expected command_a or"):
        worker("--tool-call-parser=bogus")


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
    return [word for word in child.words if not word.startswith("--endpoint")]


def test_the_worker_of_a_set_is_told_all_of_it_and_can_be_no_spare(tmp_path: Path) -> None:
    file = hostfile(tmp_path)
    child = worker("--model=m", f"--hosts={file}", "--split=tensor", "--backend=ring", "--hosts-port=5000")
    told = [f"--hosts={file}", "--split=tensor", "--backend=ring", "--hosts-port=5000"]
    assert words(child) == ["--model=m", "--served-name=m", *told]
    assert child.is_set
    assert not child.can_become(child)
    assert child.fallback is None


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
