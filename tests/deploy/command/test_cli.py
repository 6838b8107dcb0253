"""The `roundhouse` command: the processes it starts, and its error messages."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.command.keys import KEY_FILES
from deploy.serving.settings import GROUPS, SHOWN, ServeSettings, shown_flags
from tests.deploy.conftest import config
from tests.deploy.supervisor.process_output import Begin
from tests.system import free_port

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.usefixtures("runtime_folder")

STAND_IN = """
import os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
line = " ".join([__package__, str(os.getpid()), *sys.argv[1:]])
for variable in ("ROUNDHOUSE_SUPERVISOR_FD", "ROUNDHOUSE_START_FD"):
    if number := os.environ.get(variable):
        with socket.socket(fileno=int(number)) as channel:
            line += " " + channel.recv(65536).decode().split("\\n")[0]
os.write(1, f"{line}\\n".encode())  # in one piece: the other one writes at the same time
if "--once" not in sys.argv:
    signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the packages `broker` and `worker` in new processes by ones that print their arguments and the
    settings that they are sent."""
    for package in ("broker", "worker"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")


def test_help_of_serve_shows_every_setting_in_one_group_with_its_type_and_default() -> None:
    fields = SHOWN
    assert len(fields) == len(set(fields))
    assert {"config", *ServeSettings.__struct_encode_fields__} <= {*fields}
    assert {*fields} - {"config"} == {flag.field for flag in shown_flags()}
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for name in fields:
        assert f"--{name.replace('_', '-')}" in text
    for group in GROUPS:
        assert f"─ {group} ─" in text
    assert "a key under [serve]" in text
    assert "key|all" in text
    assert "(default: 8000)" in text
    assert "null" not in text


def test_curve_keys_are_written_for_their_owner_only_and_never_over_others(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert CliRunner().invoke(app, ["curve-keys", str(folder)]).exit_code == 0
    assert sorted(file.name for file in folder.iterdir()) == sorted(KEY_FILES)
    assert all(
        stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir() if "secret" in file.name
    )
    before = {file: file.read_bytes() for file in folder.iterdir()}
    again = CliRunner().invoke(app, ["curve-keys", str(folder)])
    assert again.exit_code == 78
    assert "already contains" in again.stderr
    assert before == {file: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.usefixtures("stand_ins")
def test_single_process_takes_the_place_of_the_command_with_every_word(begin: Begin, tmp_path: Path) -> None:
    words = ["--port", "1", "--unknown=x", "-q", "--help", "word", "--once"]
    told = begin([sys.executable, "-m", "deploy", "worker", *words], cwd=tmp_path)
    assert told.wait_line("worker") == " ".join(["worker", str(told.process.pid), *words])
    assert told.wait() == 0


@pytest.mark.usefixtures("stand_ins")
def test_serve_runs_both_processes_answers_a_reload_and_stops(begin: Begin, tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    flags = ["--port", "8765"]

    def reload() -> tuple[int, str]:
        told = CliRunner().invoke(app, ["reload", *flags], env=env)
        return told.exit_code, told.output

    status, output = reload()
    assert status == 78
    assert "no `roundhouse serve` is listening at" in output
    file = config(tmp_path, "[worker]\nmax_running = 3")
    words = ["serve", "--model", "pocket", "--ready-timeout", "0.5", "--config", file, *flags]
    serve = begin([sys.executable, "-m", "deploy", *words], cwd=tmp_path, env=env)
    started = sorted(serve.wait_line('"endpoint":') for _ in range(2))
    assert [line.split()[0] for line in started] == ["broker", "worker"]
    assert '"model":"pocket"' in started[1]
    assert '"max_running":3' in started[1]
    config(tmp_path, "[worker]\nmax_running = 'many'")
    status, output = reload()
    assert status == 1
    wrong = f"max_running: Expected a whole number, got text (from {file} [worker])"
    assert output.splitlines()[1:] == [wrong]
    config(tmp_path, "[worker]\nmax_running = 4")
    # The stand-in for the gateway never reports a ready worker.
    assert reload() == (1, "worker-2 was not ready within 0.5 s\n")
    assert '"model":"pocket"' in serve.wait_line('"max_running":4')
    serve.signal(signal.SIGTERM)
    assert serve.wait() == 0
    assert not (tmp_path / "roundhouse" / "serve-8765").exists()
    assert "Traceback" not in "\n".join(serve.lines)


def test_a_model_that_the_machine_cannot_hold_ends_serve_for_good(begin: Begin, tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    env |= {"ROUNDHOUSE_MEMORY_LIMIT_BYTES": "1000000"}
    words = [sys.executable, "-m", "deploy", "serve", "--port", str(free_port())]
    serve = begin(words, cwd=tmp_path, env=env)
    assert serve.wait() == 78
    said = "\n".join(serve.lines)
    assert "pocket: its weights take" in said
    assert said.count("worker runs as pid") == 1
