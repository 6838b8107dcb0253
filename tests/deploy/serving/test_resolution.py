"""Settings of all processes of `serve`, resolved once from flags, variables and the TOML file."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.serving.commandlines import children_of, flags_of, python_module
from deploy.serving.models import SPARE_BYTES
from deploy.serving.resolution import Resolved, resolve
from deploy.serving.settings import SHOWN, ServeSettings, shown_flags
from protocol import breadcrumbs, channel, lifeline
from protocol.common import listening
from protocol.settings import reader
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings
from tests.deploy.conftest import config
from worker.process import preload
from worker.ranks import rank_info

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


def alone(resolved: Resolved) -> WorkerSettings:
    """Return the settings of the only worker."""
    [worker] = resolved.first_plans
    return worker


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List to which each parsed TOML text is appended."""
    texts: list[str] = []
    loads = tomllib.loads

    def load(text: str, **options: Callable[[str], Any]) -> dict[str, Any]:
        texts.append(text)
        return loads(text, **options)

    monkeypatch.setattr(tomllib, "loads", load)
    return texts


def test_the_file_is_read_once_for_all_processes_and_once_more_for_a_reload(
    parsed: list[str], tmp_path: Path
) -> None:
    text = """
[gateway]
body_timeout = 7
[worker]
prefill_tokens = 4
[models.small]
model = "org/small"
[models.large]
max_running = 3
"""
    argv = ["--config", config(tmp_path, text)]
    gateway, small, large = children_of(resolve(argv, {}), {})
    assert parsed == [text]
    assert isinstance(gateway.settings, GatewaySettings)
    assert gateway.settings.body_timeout_s == 7
    for worker, running in ((small, 16), (large, 3)):
        assert isinstance(worker.settings, WorkerSettings)
        assert (worker.settings.prefill_tokens, worker.settings.max_running) == (4, running)
    children_of(resolve(argv, {}), {})
    assert parsed == [text] * 2


def test_a_process_gets_its_settings_as_they_are_and_needs_no_arguments(tmp_path: Path) -> None:
    argv = ["--prefix-cache-dir", str(tmp_path), "--adapter=a=/x", "--api-key=rh-1", "--journal-max=0"]
    children = children_of(resolve([*argv, "--unload-after", "9.5"], {}), {"ROUNDHOUSE_API_KEYS": "rh-2"})
    for child, module in zip(children, ("broker", "worker"), strict=True):
        assert child.argv == python_module(module)
        assert "ROUNDHOUSE_API_KEYS" not in child.env
        assert child.settings is not None
        document = channel.encode_settings(child.settings)
        read = reader.read_or_exit(type(child.settings), "", [], {}, program="", about="", document=document)
        assert read == child.settings


def test_variables_between_our_processes_are_those_of_no_setting() -> None:
    """A user who sets `ROUNDHOUSE_SPARE` means `--spare`."""
    ours = {channel.SUPERVISOR_FD, channel.SPAWN_FD, channel.SPARE, lifeline.VARIABLE, breadcrumbs.VARIABLE}
    ours |= {listening.LISTENER_FD, preload.GUARD, rank_info.LINE, rank_info.FIRST, rank_info.KEYS}
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
    assert resolve(argv, environ).gateway.api_keys_file != path
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    assert (resolve(argv, environ).gateway.api_keys_file == path) is read


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
    infos: list[Any] = [msgspec.inspect.type_info(kind) for kind in (GatewaySettings, WorkerSettings)]
    types = {field.encode_name: field.type for info in infos for field in info.fields}
    others = {"model", "endpoint", "memory_budget"}
    values = {name: a_value_for(name, types[name]) for name in SHOWN if name in types and name not in others}
    assert {"failover_timeout", "drain_timeout"} <= values.keys()
    values |= {"host": "10.0.0.1", "hosts": str(hosts), "backend": "ring", "adapters": "a=/some/a,b=/some/b"}
    words = [f"--{name.replace('_', '-')}" + f"={values[name]}" * (name not in SWITCHES) for name in values]
    resolved = resolve(words, {})
    for kind, given in (
        (GatewaySettings, resolved.for_gateway),
        (WorkerSettings, resolved.for_workers["pocket"]),
    ):
        for name in values.keys() & {*kind.__struct_encode_fields__}:
            assert given[name].source == f"--{name.replace('_', '-')}"


def test_help_of_a_setting_is_that_of_its_process() -> None:
    own = {"model", "endpoint", "memory_budget"}
    kinds = (GatewaySettings, WorkerSettings)
    described = {flag.field: flag for kind in kinds for flag in reader.flags(kind)}
    shared = [flag for flag in shown_flags() if flag.field in described.keys() - own]
    assert len(shared) > 50
    assert shared == [described[flag.field] for flag in shared]


def test_replicas_get_the_same_settings_and_a_share_of_the_memory() -> None:
    argv = ["--endpoint=ipc:///run/x.sock", "--replicas=2", "--memory-budget=8GiB", "--spare=0"]
    resolved = resolve([*argv, "--join=tcp://10.0.0.1:7733"], {})
    _, *workers = children_of(resolved, {})
    assert resolved.gateway == GatewaySettings(endpoint="ipc:///run/x.sock", join="tcp://10.0.0.1:7733")
    own = WorkerSettings(endpoint="ipc:///run/x.sock", model="", served_name="pocket", memory_budget=2**32)
    assert [(child.name, child.settings) for child in workers] == [("worker", own), ("worker.2", own)]


def test_a_table_gives_a_model_its_name_and_its_worker_settings_of_its_own(tmp_path: Path) -> None:
    text = """
[serve]
max_running = 4
[models.small]
model = "org/small"
aliases = ["gpt-4o-mini"]
max_running = "8"
[models.pocket]
resident = true
"""
    resolved = resolve(["--config", config(tmp_path, text), "--memory-budget=1GiB"], {})
    names = ["gateway", "worker[small]", "worker[pocket]"]
    assert [child.name for child in children_of(resolved, {})] == names
    assert (resolved.serve.memory_budget, resolved.serve.spare) == (2**30 - SPARE_BYTES, 1)
    small, pocket = resolved.models
    assert (small.aliases, small.resident, pocket.resident) == (("gpt-4o-mini",), False, True)
    assert [worker.max_running for worker in resolved.first_plans] == [8, 4]
    assert {worker.memory_budget for worker in resolved.first_plans} == {2**30 - SPARE_BYTES}
    # Set explicitly, so that no variable or [worker] table selects another model.
    assert [worker.model for worker in resolved.first_plans] == ["org/small", ""]


@pytest.mark.parametrize("way", ["flag", "file"])
def test_api_keys_are_in_no_command_line_and_no_environment(way: str, tmp_path: Path) -> None:
    argv = ["--api-key", "rh-one", "--api-key", "rh-two"] if way == "flag" else []
    environ = {"ROUNDHOUSE_API_KEYS": "rh-old"}
    if way == "file":
        argv = ["--config", config(tmp_path, '[serve]\napi_keys = ["rh-one", "rh-two"]')]
        environ = {}
    resolved = resolve(argv, environ)
    assert resolved.gateway.api_keys == ("rh-one", "rh-two")
    assert not any("rh-" in word for word in flags_of(resolved.for_gateway, resolved.config))
    for child in children_of(resolved, environ):
        assert not any("rh-" in word for word in (*child.argv, *child.env.values()))


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    text = """
[serve]
model = "from-file"
max_running = 1
max_waiting = 1
kv_bits = 8
[gateway]
max_waiting = 7
body_timeout = 7
[worker]
kv_bits = 4
prefill_tokens = 7
inter_token_target = 7
"""
    names = {"CONFIG": config(tmp_path, text), "MAX_RUNNING": "2", "MAX_WAITING": "2", "PREFILL_TOKENS": "2"}
    environ = {f"ROUNDHOUSE_{name}": value for name, value in names.items()}
    environ["ROUNDHOUSE_SERVED_NAME"] = "named"
    resolved = resolve(["--max-running", "3"], environ)
    gateway, worker = resolved.gateway, alone(resolved)
    assert (worker.model, worker.served_name) == ("from-file", "named")
    assert (worker.max_running, worker.prefill_tokens, worker.kv_bits) == (3, 2, 8)
    assert (gateway.max_waiting, gateway.body_timeout_s, worker.inter_token_target_s) == (2, 7, 7)
    sources = resolved.for_workers["named"]
    assert sources["max_running"].source == "--max-running"
    assert sources["prefill_tokens"].source == "ROUNDHOUSE_PREFILL_TOKENS"
    assert sources["kv_bits"].source.endswith("[serve]")
    # What stands in its own section, a process that runs alone reads itself.
    assert "--kv-bits=8" in flags_of(sources, resolved.config)
    assert not any("inter-token" in word for word in flags_of(sources, resolved.config))


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
    environ = {"ROUNDHOUSE_PORT": "1"} if argv else {}
    resolved = resolve([*argv, "--config", config(tmp_path, table)], environ)
    assert resolved.gateway.endpoint == f"ipc://{tmp_path}/roundhouse/{server}.sock"
    assert alone(resolved).endpoint == resolved.gateway.endpoint


def refused(argv: list[str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        resolve(argv, environ or {})
    return str(caught.value).splitlines()


def test_errors_of_all_sections_and_sources_are_one_message(tmp_path: Path) -> None:
    text = """
[serve]
max_runing = 1
[gateway]
body_timeout = "soon"
[worker]
prefil_tokens = 1
[models.small]
max_runing = 8
[models.large]
prefill_tokens = 0
"""
    file = config(tmp_path, text)
    environ = {"ROUNDHOUSE_INTER_TOKEN_MAX": "0", "ROUNDHOUSE_MAX_KV_SIZE": "9"}
    [removed, *others] = refused(["--config", file, "--port=x"], environ)
    assert removed.startswith("ROUNDHOUSE_MAX_KV_SIZE: it was removed: --kv-bits")
    assert others == [
        f"{file}: unknown key max_runing in [serve]; did you mean max_running?",
        "port: Expected a whole number, got text (from --port)",
        f"body_timeout: Expected a number, got text (from {file} [gateway])",
        f"[models.small] max_runing: unknown key; did you mean max_running? (from {file})",
        f"{file}: unknown key prefil_tokens in [worker]; did you mean prefill_tokens?",
        "inter_token_max: Expected a number > 0.0 (from ROUNDHOUSE_INTER_TOKEN_MAX)",
        f"[models.large] prefill_tokens: Expected a whole number >= 1 (from {file})",
    ]


def test_foreign_worker_module_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert python_module("worker") == [sys.executable, "-P", "-m", "worker"]
    monkeypatch.chdir(ROOT)
    assert python_module("worker") == [sys.executable, "-m", "worker"]
