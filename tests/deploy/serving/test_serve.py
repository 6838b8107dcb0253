"""Processes of `serve` and their flags, from flags, variables and the TOML file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from deploy.serving import serve
from deploy.serving.commandlines import python_module
from deploy.serving.models import SPARE_BYTES
from deploy.serving.settings import GATEWAY_FLAGS, WORKER_FLAGS, ServeSettings
from protocol import breadcrumbs, channel, lifeline
from protocol.common import listening
from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings
from tests.deploy.conftest import config
from worker import preload
from worker.ranks import rank_info, rank_keys

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.usefixtures("runtime_folder")


SWITCHES = (
    "exact",
    "insecure_no_keys",
    "inspect",
    "keep_awake",
    "keyless_metrics",
    "log_prompts",
    "text_only",
)


def flags(argv: list[str], environ: dict[str, str] | None = None) -> dict[str, list[str]]:
    """Return the arguments of each child after `-m package`."""
    _, children = serve.read(argv, environ or {})
    told = {}
    for child in children:
        words = list(child.argv)
        told[child.name] = words[words.index("-m") + 2 :]
    return told


def test_variables_between_our_processes_are_those_of_no_setting() -> None:
    """A user who sets `ROUNDHOUSE_SPARE` means `--spare`."""
    ours = {channel.SUPERVISOR_FD, channel.SPAWN_FD, channel.SPARE, lifeline.VARIABLE, breadcrumbs.VARIABLE}
    ours |= {listening.LISTENER_FD, preload.GUARD, rank_info.LINE, rank_info.FIRST, rank_keys.VARIABLE}
    kinds = (ServeSettings, GatewaySettings, WorkerSettings)
    names = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert {"spare", "max_running", "port"} <= names
    assert ours & {f"ROUNDHOUSE_{name.upper()}" for name in names} == set()


@pytest.mark.parametrize(
    ("argv", "file", "read"),
    [
        ([], "", True),
        (["--insecure-no-keys"], "", False),
        (["--api-keys-file", "other"], "", False),
        ([], "[gateway]\napi_keys = ['secret']", False),
    ],
)
def test_keys_that_were_created_are_required_unless_settings_name_others_or_none(
    argv: list[str], file: str, read: bool, tmp_path: Path
) -> None:
    environ, path = {"HOME": str(tmp_path)}, tmp_path / ".config" / "roundhouse" / "api-keys"
    argv = [*argv, "--config", config(tmp_path, file)]
    flag = f"--api-keys-file={path}"
    assert flag not in flags(argv, environ)["gateway"]
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    assert (flag in flags(argv, environ)["gateway"]) is read
    assert not any("api-keys" in word for word in flags(argv, environ)["worker"])


def a_value_for(name: str, kind: msgspec.inspect.Type) -> str:
    """Return a valid command-line value of a setting."""
    match kind:
        case msgspec.inspect.Metadata(inner):
            return a_value_for(name, inner)
        case msgspec.inspect.UnionType(types):
            return a_value_for(name, next(t for t in types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.LiteralType(values):
            return str(values[-1])
        case msgspec.inspect.IntType(ge=low):
            return str((low or 0) + 3)
        case msgspec.inspect.FloatType(le=high):
            return str(min(2.5, high or 2.5))
        case msgspec.inspect.BoolType():
            return "true"
        case msgspec.inspect.VarTupleType():
            return "https://a,https://b"
        case _:
            return f"/some/{name}"


def test_everything_that_serve_is_told_for_others_reaches_them(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    fields = {f.name: f for f in msgspec.inspect.type_info(ServeSettings).fields}  # type: ignore[attr-defined]
    shared = dict.fromkeys((*GATEWAY_FLAGS, *WORKER_FLAGS))
    values = {name: a_value_for(name, fields[name].type) for name in shared}
    assert {"failover_timeout_s", "drain_timeout_s"} <= values.keys()
    values |= {"host": "10.0.0.1", "hosts": str(hosts), "backend": "ring", "adapters": "a=/some/a,b=/some/b"}
    switches = [f"--{name.replace('_', '-')}" for name in SWITCHES]
    words = [
        f"--{fields[name].encode_name.replace('_', '-')}={value}"
        for name, value in values.items()
        if f"--{name.replace('_', '-')}" not in switches
    ]
    given, _ = serve.read([*words, *switches], {})
    told = flags([*words, *switches])
    gateway = settings.read(GatewaySettings, "gateway", told["gateway"], {}, program="", about="")
    worker = settings.read(WorkerSettings, "worker", told["worker"], {}, program="", about="")
    for names, child in ((GATEWAY_FLAGS, gateway), (WORKER_FLAGS, worker)):
        for name in names:
            assert getattr(given, name) not in (None, ())
            assert getattr(child, name) == getattr(given, name), name


def test_replicas_are_told_the_same_and_the_gateway_where_others_join() -> None:
    argv = ["--endpoint=ipc:///run/x.sock", "--replicas=2", "--memory-budget=8GiB", "--spare=0"]
    common, share = "--endpoint=ipc:///run/x.sock", f"--memory-budget={2**32}"
    own = ["--model=", "--served-name=pocket", share]
    assert flags([*argv, "--join=tcp://10.0.0.1:7733"]) == {
        "gateway": [common, "--join=tcp://10.0.0.1:7733"],
        "worker": [common, *own],
        "worker.2": [common, *own],
    }


def test_a_table_gives_a_model_its_name_and_its_worker_settings_of_its_own(tmp_path: Path) -> None:
    text = """
[serve]
max_running = 4
[models.small]
model = "org/small"
aliases = ["gpt-4o-mini"]
max_running = 8
[models.pocket]
resident = true
"""
    file = config(tmp_path, text)
    given, children = serve.read(["--config", file, "--memory-budget=1GiB"], {})
    assert [child.name for child in children] == ["gateway", "worker[small]", "worker[pocket]"]
    assert (given.memory_budget, given.spare) == (2**30 - SPARE_BYTES, 1)
    _, small, pocket = children
    assert (small.model.aliases, small.model.resident) == (("gpt-4o-mini",), False)
    assert pocket.model.resident
    # Of two equal flags, the last one is used.
    assert small.argv[-3:] == ["--max-running=4", f"--memory-budget={2**30 - SPARE_BYTES}", "--max-running=8"]

    # Set explicitly, so that no variable or [worker] table selects another model.
    assert "--model=" in pocket.argv


@pytest.mark.parametrize("way", ["flag", "file"])
def test_api_keys_are_on_no_command_line_and_no_business_of_the_worker(way: str, tmp_path: Path) -> None:
    argv = ["--api-key", "rh-one", "--api-key", "rh-two"] if way == "flag" else []
    environ = {"ROUNDHOUSE_API_KEYS": "rh-old"}
    if way == "file":
        argv = ["--config", config(tmp_path, '[serve]\napi_keys = ["rh-one", "rh-two"]')]
        environ = {}
    _, [gateway, worker] = serve.read(argv, environ)
    assert gateway.env["ROUNDHOUSE_API_KEYS"] == "rh-one,rh-two"
    assert "ROUNDHOUSE_API_KEYS" not in worker.env
    assert not any("rh-" in word for child in (gateway, worker) for word in child.argv)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, '[serve]\nmodel = "from-file"\nmax_running = 1\nmax_waiting = 1')
    environ = {"ROUNDHOUSE_CONFIG": file, "ROUNDHOUSE_MAX_RUNNING": "2", "ROUNDHOUSE_MAX_WAITING": "2"}
    environ["ROUNDHOUSE_SERVED_NAME"] = "named"
    told = flags(["--max-running", "3"], environ)
    assert {"--model=from-file", "--served-name=named"} <= {*told["worker"]}
    assert "--max-running=3" in told["worker"]
    assert "--max-waiting=2" in told["gateway"]
    assert told["gateway"][0] == told["worker"][0] == f"--config={file}"


@pytest.mark.parametrize(
    ("argv", "table", "server"),
    [
        (["--port", "1"], "[gateway]\nport = 4", "1"),
        ([], "[serve]\nport = 3\n[gateway]\nport = 4", "3"),
        (["--port", "1"], "[gateway]\nhost = '10.0.0.7'", "1-10.0.0.7"),
        (["--port", "1", "--host", "::1"], "[gateway]\nhost = '10.0.0.7'", "1-__1"),
    ],
)
def test_the_endpoint_is_named_by_the_address_that_the_gateway_will_have(
    argv: list[str], table: str, server: str, tmp_path: Path
) -> None:
    told = flags([*argv, "--config", config(tmp_path, table)], {"ROUNDHOUSE_PORT": "1"} if argv else {})
    assert f"--endpoint=ipc://{tmp_path}/roundhouse/{server}.sock" in told["worker"]
    assert told["gateway"][1] == told["worker"][1]


def refused(argv: list[str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        serve.read(argv, environ or {})
    return str(caught.value).splitlines()


def test_errors_of_serve_models_and_worker_sections_are_one_message(tmp_path: Path) -> None:
    text = """
[serve]
max_runing = 1
[worker]
prefil_tokens = 1
[models.small]
max_runing = 8
[models.large]
prefill_tokens = 0
"""
    file = config(tmp_path, text)
    assert refused(["--config", file, "--port=x"]) == [
        f"{file}: unknown key max_runing in [serve]; did you mean max_running?",
        "port: Expected a whole number, got text (from --port)",
        f"[models.small] max_runing: unknown key; did you mean max_running? (from {file})",
        f"[models.large] prefill_tokens: Expected a whole number >= 1 (from {file})",
        f"{file}: unknown key prefil_tokens in [worker]; did you mean prefill_tokens?",
    ]


def test_foreign_worker_module_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert python_module("worker") == [sys.executable, "-P", "-m", "worker"]
    monkeypatch.chdir(ROOT)
    assert python_module("worker") == [sys.executable, "-m", "worker"]
