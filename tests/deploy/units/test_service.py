"""`roundhouse service`: unit files rendered from flags, and commands to the service manager."""

from __future__ import annotations

import os
import plistlib
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.serving.commandlines import SOURCE_FOLDER
from deploy.supervisor.children import KILL_WAIT_S_MAX
from deploy.units import jobs, service
from deploy.units.jobs import Job, absolute_flags
from deploy.units.launchd import Launchd, agents
from deploy.units.launchd import read_status as read_launchd
from deploy.units.manager import COMMAND_S_MAX, ServiceError, Status
from deploy.units.systemd import Systemd, service_unit
from deploy.units.systemd import read_status as read_systemd
from protocol import lifeline
from protocol.common.api_keys import KeysError
from protocol.settings.reader import SettingsError
from tests.deploy.conftest import config
from tests.deploy.units.agents import Agents

GATEWAY, WORKER, SOCKET = (
    "roundhouse-gateway.service",
    "roundhouse-worker.service",
    "roundhouse-gateway.socket",
)
Unit = dict[str, dict[str, list[str]]]


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment with home and runtime folder in the test's folder, and without the user's variables."""
    for name in [name for name in os.environ if name.startswith(("ROUNDHOUSE_", "HF_", "XDG_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


def plists(home: Path, argv: list[str], environ: dict[str, str]) -> dict[str, dict[str, Any]]:
    files = Launchd(agents(home, environ, 501), Agents()).files(jobs.read(argv, environ))
    parsed = {name: plistlib.loads(text.encode()) for name, text in files.items()}
    assert all(name == f"{plist['Label']}.plist" for name, plist in parsed.items())
    return {plist["Label"]: plist for plist in parsed.values()}


def parse(text: str) -> Unit:
    """Parse a unit into sections, each key with its values in order."""
    unit: Unit = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            unit[line.strip("[]")] = section = {}
        else:
            key, value = line.split("=", 1)
            section.setdefault(key, []).append(value)
    return unit


def units(home: Path, argv: list[str], environ: dict[str, str]) -> dict[str, str]:
    return Systemd(home, {}).files(jobs.read(argv, environ))


# --- rendering -------------------------------------------------------------------------------------------


def test_the_gateways_plist_says_what_launchd_is_to_do(tmp_path: Path, environ: dict[str, str]) -> None:
    variables = environ | {
        "ROUNDHOUSE_LOG_LEVEL": "debug",
        "HF_HOME": "/models",
        lifeline.VARIABLE: "7",
        "EDITOR": "ed",
    }
    flags = ["--port=8123", "--max-waiting=3", "--stop-timeout=7.5", "--deaths-max=4"]
    gateway = plists(tmp_path, flags, variables)["mlx-roundhouse.gateway"]
    program = gateway.pop("ProgramArguments")
    logs = tmp_path / "Library/Logs/roundhouse"
    sockets = gateway.pop("Sockets")["http"]
    assert (sockets["SockNodeName"], sockets["SockServiceName"]) == ("127.0.0.1", "8123")
    expected = {
        "EnvironmentVariables": {**environ, "ROUNDHOUSE_LOG_LEVEL": "debug", "HF_HOME": "/models"},
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": 18,
        "StandardErrorPath": str(logs / "gateway.log"),
        "Umask": 0o077,
    }
    assert expected.items() <= gateway.items()
    assert Path(program[0]).is_absolute()
    end = program.index("--")
    assert program[program.index("deploy.units.launchd_shim") + 1 : end] == [
        f"--starts-file={logs / 'gateway.starts'}",
        "--starts-max=5",
        "--socket=http",
    ]
    # No endpoint: the gateway creates the default one's folder itself, again after a reboot.
    command = program[end + 1 :]
    assert command[0] == program[0]
    assert command[command.index("broker") + 1 :] == ["--port=8123", "--max-waiting=3", "--log-level=debug"]


def test_worker_is_a_job_that_connects_to_the_gateway(tmp_path: Path, environ: dict[str, str]) -> None:
    worker = plists(tmp_path, ["--port=8123", "--model=some/model"], environ)["mlx-roundhouse.worker"]
    assert "Sockets" not in worker
    program = worker["ProgramArguments"]
    told = [f"--endpoint=ipc://{tmp_path}/run/roundhouse/8123.sock"]
    told += ["--model=some/model", "--served-name=some/model"]
    assert "--stop-timeout=25.0" in program[program.index("deploy.units.worker_with_spare") : -3]
    assert program[program.index("worker") + 1 :] == told
    assert not any(word.startswith("--socket") for word in program)
    alone = plists(tmp_path, ["--port=8123", "--model=some/model", "--spare=0"], environ)
    program = alone["mlx-roundhouse.worker"]["ProgramArguments"]
    assert "deploy.units.worker_with_spare" not in program
    assert program[program.index("worker") + 1 :] == told


def test_both_managers_listen_where_the_gateway_would(tmp_path: Path, environ: dict[str, str]) -> None:
    flags = ["--config", config(tmp_path, '[gateway]\nhost = "::1"\nport = 9000')]
    told = plists(tmp_path, flags, environ)["mlx-roundhouse.gateway"]["Sockets"]["http"]
    assert (told["SockNodeName"], told["SockServiceName"], told["SockFamily"]) == ("::1", "9000", "IPv6")
    assert parse(units(tmp_path, flags, environ)[SOCKET])["Socket"]["ListenStream"] == ["[::1]:9000"]


def test_the_units_say_what_systemd_is_to_do(tmp_path: Path, environ: dict[str, str]) -> None:
    variables = environ | {"HF_HOME": "/my models"}
    files = units(tmp_path, ["--port=8123", "--stop-timeout=7.5", "--deaths-max=4"], variables)
    assert sorted(files) == sorted([GATEWAY, SOCKET, WORKER])
    for name in (GATEWAY, WORKER):
        unit = parse(files[name])
        assert unit["Unit"]["StartLimitIntervalSec"] == ["300"]
        assert unit["Unit"]["StartLimitBurst"] == ["5"]
        told = unit["Service"]
        program = shlex.split(told.pop("ExecStart")[0])
        assert Path(program[0]).is_absolute()
        assert {key: values[0] for key, values in told.items()} == {
            "Type": "exec",
            "WorkingDirectory": str(SOURCE_FOLDER),
            "Environment": '"HF_HOME=/my models"',
            "Restart": "on-failure",
            "RestartSec": "0.5",
            "RestartPreventExitStatus": "78",
            "KillMode": "mixed",
            "TimeoutStopSec": "17.5" if name == GATEWAY else "22.5",
            "LimitNOFILE": "8192:65536",
            "UMask": "0077",
        }
        assert unit["Install"] == {"WantedBy": ["default.target"]}
    assert parse(files[GATEWAY])["Unit"]["Requires"] == parse(files[GATEWAY])["Unit"]["After"] == [SOCKET]
    assert "Requires" not in parse(files[WORKER])["Unit"]
    assert parse(files[SOCKET])["Socket"] == {"ListenStream": ["127.0.0.1:8123"], "Backlog": ["2048"]}
    assert parse(files[SOCKET])["Install"] == {"WantedBy": ["sockets.target"]}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=40))
def test_a_word_reaches_the_process_as_it_was_given(word: str) -> None:
    job = Job(
        name="worker", argv=["/python", word], environment={}, folder=Path("/"),
        stop_timeout_s=1, starts_max=1, window_s=1,
    )  # fmt: skip
    (line,) = parse(service_unit(job))["Service"]["ExecStart"]
    # No variable or specifier is left for systemd to expand.
    assert "%" not in line.replace("%%", "")
    assert "$" not in line.replace("$$", "")
    assert shlex.split(line.replace("%%", "%").replace("$$", "$")) == ["/python", word]


# --- installation ----------------------------------------------------------------------------------------


class Systemctl:
    """Stand-in for systemctl: units that are known, enabled and active, and each start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: set[str] = set()
        self.enabled: set[str] = set()
        self.active: set[str] = set()
        self.starts: list[str] = []
        self.refuses = ""
        self.patience_s: dict[str, float] = {}
        """Timeout of the last command of each kind, in seconds."""

    def __call__(
        self, words: Sequence[str], within_s: float = COMMAND_S_MAX
    ) -> subprocess.CompletedProcess[str]:
        self.patience_s[words[2]] = within_s
        assert words[:2] == ["systemctl", "--user"]
        verb, names = words[2], [word for word in words[3:] if not word.startswith("--")]
        if verb == self.refuses:
            return subprocess.CompletedProcess(words, 1, "", "Failed to connect to bus: No medium found")
        if verb == "daemon-reload":
            self.known = {path.name for path in self.folder.glob("*.s*")}
            return subprocess.CompletedProcess(words, 0, "", "")
        if missing := set(names) - self.known:
            return subprocess.CompletedProcess(words, 5, "", f"Unit {min(missing)} not loaded.")
        match verb:
            case "enable":
                self.enabled |= set(names)
            case "disable":
                assert "--now" in words
                self.enabled -= set(names)
                self.active -= set(names)
            case "restart":
                self.starts += names
                self.active |= set(names)
            case "start":
                self.starts += [name for name in names if name not in self.active]
                self.active |= set(names)
        return subprocess.CompletedProcess(words, 0, "", "")


@pytest.fixture
def systemctl(tmp_path: Path) -> Systemctl:
    return Systemctl(tmp_path / ".config/systemd/user")


@pytest.fixture
def manager(tmp_path: Path, systemctl: Systemctl) -> Systemd:
    return Systemd(tmp_path, {}, systemctl)


def test_installed_all_runs_with_private_files_and_removed_nothing_is_left(
    manager: Systemd, systemctl: Systemctl, environ: dict[str, str]
) -> None:
    service.install(manager, jobs.read([], environ))
    every = sorted([GATEWAY, SOCKET, WORKER])
    assert systemctl.enabled == systemctl.active == set(every)
    assert sorted(systemctl.starts) == every
    assert sorted(path.name for path in manager.folder.iterdir()) == every
    assert {stat.S_IMODE(path.stat().st_mode) for path in manager.folder.iterdir()} == {0o600}
    (manager.folder / "other.service").touch()
    assert sorted(service.remove(manager)) == every
    assert [path.name for path in manager.folder.iterdir()] == ["other.service"]
    assert systemctl.enabled == systemctl.active == set()
    assert systemctl.known == {"other.service"}
    assert service.remove(manager) == []


@pytest.mark.parametrize(
    ("flags", "restarted"),
    [
        ([], []),
        (["--max-waiting=1"], [GATEWAY]),  # its socket keeps listening
    ],
)
def test_installed_again_only_what_has_changed_starts_anew(
    flags: list[str], restarted: list[str], manager: Systemd, systemctl: Systemctl, environ: dict[str, str]
) -> None:
    service.install(manager, jobs.read([], environ))
    systemctl.starts.clear()
    assert sorted(service.install(manager, jobs.read(flags, environ))) == sorted(restarted)
    assert sorted(systemctl.starts) == sorted(restarted)


def test_drain_timeout_extends_the_kill_timeout(tmp_path: Path, environ: dict[str, str]) -> None:
    flags = ["--stop-timeout=7", "--config", config(tmp_path, "[worker]\ndrain_timeout = 600")]
    # The launcher of worker and spare gets the time for SIGKILL in addition.
    kept_s = 7 + 600 + KILL_WAIT_S_MAX
    assert [job.stop_timeout_s for job in jobs.read(flags, environ)] == [17, kept_s]
    assert plists(tmp_path, flags, environ)["mlx-roundhouse.worker"]["ExitTimeOut"] == kept_s
    assert parse(units(tmp_path, flags, environ)[WORKER])["Service"]["TimeoutStopSec"] == [f"{kept_s:g}"]
    flags += ["--drain-timeout=300", "--spare=0"]
    assert [job.stop_timeout_s for job in jobs.read(flags, environ)] == [307, 307]


def test_a_reload_restarts_one_job_alone_and_commands_wait_for_the_drain_timeout(
    manager: Systemd, systemctl: Systemctl, environ: dict[str, str]
) -> None:
    assert service.reload(manager) == []
    service.install(manager, jobs.read(["--drain-timeout=600"], environ))
    systemctl.starts.clear()
    assert service.reload(manager) == systemctl.starts == [WORKER]
    systemctl.starts.clear()
    assert service.reload(manager, gateway=True) == systemctl.starts == [GATEWAY], "not its socket"
    service.remove(manager)
    patience_s = systemctl.patience_s
    assert min(patience_s["restart"], patience_s["disable"]) > 600
    assert patience_s["daemon-reload"] == COMMAND_S_MAX


def test_a_job_that_runs_is_given_what_launchd_knows_of_it_though_its_file_is_newer(tmp_path: Path) -> None:
    waits = {}

    def launchctl(words: Sequence[str], within_s: float = 0.0) -> subprocess.CompletedProcess[str]:
        waits[words[1]] = within_s
        known = words[1] == "print" and "bootout" not in waits
        return subprocess.CompletedProcess(words, 0 if known else 113, "x = {\n\texit timeout = 600\n}", "")

    manager = Launchd(agents(tmp_path, {}, 501), launchctl)
    manager.folder.mkdir(parents=True)
    (manager.folder / "mlx-roundhouse.worker.plist").write_bytes(plistlib.dumps({"ExitTimeOut": 20}))
    manager.unload(["mlx-roundhouse.worker.plist"])
    assert waits["bootout"] > 600


def test_a_manager_that_refuses_is_an_error_in_its_words(
    manager: Systemd, systemctl: Systemctl, environ: dict[str, str]
) -> None:
    systemctl.refuses = "daemon-reload"
    with pytest.raises(ServiceError, match="No medium found"):
        service.install(manager, jobs.read([], environ))
    assert not manager.folder.exists()
    systemctl.refuses = "enable"
    with pytest.raises(ServiceError, match=r"systemctl --user enable .*No medium found"):
        service.install(manager, jobs.read([], environ))
    assert len(service.remove(manager)) == 3, "the partial installation can be removed"
    assert list(manager.folder.iterdir()) == []


# --- status ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "pid", "last_exit"),
    [
        ("LoadState=loaded MainPID=0 ExecMainCode=1 ExecMainStatus=78 Result=exit-code", None, "status 78"),
        (
            "LoadState=loaded MainPID=0 ExecMainCode=2 ExecMainStatus=9 NRestarts=11 Result=start-limit-hit",
            None,
            "SIGKILL (given up), 11 restarts",
        ),
    ],
)
def test_systemd_status_is_parsed(shown: str, pid: int | None, last_exit: str) -> None:
    assert read_systemd("worker", shown.replace(" ", "\n") + "\n") == Status("worker", pid, last_exit)


@pytest.mark.parametrize(
    ("printed", "pid", "last_exit"),
    [
        (None, None, "not loaded"),
        ("\tstate = running\n\n\tpid = 12\n\tlast exit code = (never exited)", 12, ""),
        ("\tsockets = {\n\t\tpid = 7\n\t}\n\tlast terminating signal = Killed: 9", None, "Killed: 9"),
    ],
)
def test_launchctl_status_is_parsed(printed: str | None, pid: int | None, last_exit: str) -> None:
    text = None if printed is None else f"gui/501/x = {{\n{printed}\n}}\n"
    assert read_launchd("worker", text) == Status("worker", pid, last_exit)


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "file"), [("linux", ".service"), ("darwin", ".plist")])
def test_a_dry_run_prints_the_files_without_secrets_and_changes_nothing(
    platform: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.units.service.sys.platform", platform)
    # Root's jobs would be daemons.
    monkeypatch.setattr("deploy.units.launchd.for_this_user", lambda user: Launchd(agents(tmp_path, {}, 501)))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    result = CliRunner().invoke(app, ["service", "install", "--model=some/model", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert f"{file}\n" in result.stdout
    assert "--model=some/model" in result.stdout
    assert "HF_TOKEN" in result.stdout
    assert "secret" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("platform", "says"), [("linux", "loginctl enable-linger"), ("darwin", "there is no user nobody-here")]
)
def test_a_user_of_its_own_is_for_daemons_of_a_user_that_exists(
    platform: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.units.service.sys.platform", platform)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    result = CliRunner().invoke(app, ["service", "install", "--user=nobody-here"])
    assert result.exit_code == 78
    assert says in result.stderr


def test_command_is_run_and_its_failure_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text(f"#!{sys.executable}\nimport sys; sys.exit('no bus for ' + ' '.join(sys.argv[1:]))\n")
    tool.chmod(0o700)
    monkeypatch.setattr("deploy.units.service.sys.platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["service", "install"])
    assert result.exit_code == 78
    assert "cannot reach your user's systemd: no bus for --user daemon-reload" in result.stderr


def test_api_keys_are_the_gateways_alone_and_on_no_command_line(environ: dict[str, str]) -> None:
    gateway, worker = jobs.read(["--api-keys=sk-very-secret-key"], environ)
    assert gateway.environment == {"ROUNDHOUSE_API_KEYS": "sk-very-secret-key"}
    assert worker.environment == {}
    assert not any("very-secret" in word for job in (gateway, worker) for word in job.argv)


def test_what_serve_refuses_is_not_installed(environ: dict[str, str]) -> None:
    for argv in (["--host=0.0.0.0"], ["--host=0.0.0.0", "--model=org/a", "--model=org/b"]):
        with pytest.raises(KeysError, match="there are no API keys"):
            jobs.read(argv, environ)
    assert jobs.read(["--host=0.0.0.0", "--insecure-no-keys"], environ)
    assert jobs.read(["--host=0.0.0.0"], environ | {"ROUNDHOUSE_API_KEYS": "rh-1"})


def test_several_models_are_one_job_that_decides_who_runs(environ: dict[str, str], tmp_path: Path) -> None:
    argv = ["--model=org/a", "--model=b=org/b", "--memory-budget=1GiB"]
    [job] = jobs.read(argv, environ | {"ROUNDHOUSE_API_KEYS": "rh-1", "HOME": "/x"})
    assert job.name == "serve"
    assert list(job.argv[-5:]) == ["deploy", "serve", *argv]
    assert job.environment == {"ROUNDHOUSE_API_KEYS": "rh-1"}
    assert job.address is None
    files = Systemd(tmp_path, environ, Agents()).files([job])
    assert list(files) == ["roundhouse-serve.service"]
    with pytest.raises(SettingsError, match="use --api-keys-file"):
        jobs.read([*argv, "--api-key=rh-2"], environ)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model folder, keys and a hostfile."""
    folder = tmp_path / "elsewhere"
    (folder / "model").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_paths_given_relative_are_absolute_in_the_flags_of_a_job(elsewhere: Path) -> None:
    given = [
        "--model",
        "name=model",
        "--model=org/id",
        "--model=pocket",
        "--api-keys-file=keys",
        "--fallback",
        "model@hosts",
    ]
    assert absolute_flags([*given, "--config", "c.toml", "--no-keep-awake", "--prot=1"]) == [
        f"--model=name={elsewhere}/model",
        "--model=org/id",
        "--model=pocket",
        f"--api-keys-file={elsewhere}/keys",
        f"--fallback={elsewhere}/model@{elsewhere}/hosts",
        f"--config={elsewhere}/c.toml",
        "--no-keep-awake",
        "--prot=1",
    ]


def test_relative_path_in_the_file_of_a_service_is_refused(elsewhere: Path, environ: dict[str, str]) -> None:
    text = '[models.a]\nmodel = "model"\n[models.b]\nmodel = "org/id"\n[gateway]\napi_keys_file = "~/keys"\n'
    (elsewhere / "c.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        jobs.read(["--config=c.toml"], environ)
    assert str(error.value) == (
        f"[models.a] model: a service needs an absolute path: {elsewhere}/model (from {elsewhere}/c.toml)"
    )
