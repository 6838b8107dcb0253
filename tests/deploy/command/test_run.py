"""`roundhouse run`: a chat with a model that is served already, or for the time of the chat."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deploy.agents.profiles import Endpoint
from deploy.command import run
from deploy.command.cli import app
from tests.hosts import endpoint_that_answers
from tests.system import eventually, free_port

pytestmark = pytest.mark.usefixtures("runtime_folder")

HEALTH = (200, b'{"status": "ok"}')
RUN_S_MAX = 90.0
GONE_S_MAX = 30.0


def listed(name: str, state: str = "loaded") -> tuple[int, bytes]:
    return 200, b'{"data": [{"id": "%s", "state": "%s"}]}' % (name.encode(), state.encode())


def test_run_beside_a_server_of_other_models_names_a_free_port() -> None:
    with endpoint_that_answers({"/health": HEALTH, "/v1/models": listed("other")}) as served:
        port = served.url.rpartition(":")[2]
        result = CliRunner().invoke(app, ["run", "org/wanted", "--port", port])
    assert result.exit_code == 78
    [line] = result.stderr.splitlines()
    assert line.startswith("roundhouse run: the endpoint does not serve a model org/wanted; available: other")
    assert "; to serve it beside that one, use --port " in line


def test_run_uses_the_server_that_has_the_model_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chats: list[dict[str, object]] = []
    monkeypatch.setattr("deploy.command.chat.chat", lambda **given: chats.append(given))
    with endpoint_that_answers({"/health": HEALTH, "/v1/models": listed("pocket")}) as served:
        port = int(served.url.rpartition(":")[2])
        result = CliRunner().invoke(app, ["run", "pocket", "hello", "--port", str(port)])
    assert result.exit_code == 0
    assert chats == [{"words": ["hello"], "model": "pocket", "host": None, "port": port}]


def test_run_tells_of_a_server_that_ends_or_never_loads_the_model() -> None:
    nowhere = Endpoint(f"http://127.0.0.1:{free_port()}")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(78)"])
    with pytest.raises(run.RunError, match="serve ended with status 78"):
        run._await_loaded(ended, nowhere, "m", time.monotonic() + RUN_S_MAX, look_s=0.05)
    endless = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(run.RunError, match="m was not loaded within"):
            run._await_loaded(endless, nowhere, "m", time.monotonic(), look_s=0.05)
    finally:
        endless.communicate()


def test_run_serves_the_model_answers_and_leaves_no_process(tmp_path: Path) -> None:
    port = free_port()
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "run", "pocket", "Say hello.", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        stdin=subprocess.DEVNULL,
        check=False,
        env=os.environ | {"STARTED_BY": str(port)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    eventually(lambda: not any(_is_of(each, port) for each in psutil.process_iter()), within_s=GONE_S_MAX)


def _is_of(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get("STARTED_BY") == str(port)
    return False
