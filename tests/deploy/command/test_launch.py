"""`roundhouse launch`: the process becomes an agent whose environment selects the endpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.agents.profiles import Agent
from deploy.command.cli import app
from tests.deploy.conftest import config
from tests.deploy.supervisor.process_output import Begin
from tests.hosts import Served, endpoint_that_answers
from tests.system import free_port

pytestmark = pytest.mark.usefixtures("runtime_folder")

LISTED = {"data": [{"id": "pocket", "context_length": 4096, "state": "loaded"}, {"id": "other"}]}

# Prints its pid, arguments and environment.
STAND_IN = f"""#!{sys.executable}
import json, os, sys
seen = {{name: os.environ.get(name) for name in ("ROUNDHOUSE_API_KEY", "ANTHROPIC_API_KEY", "HOME")}}
print(json.dumps(dict(pid=os.getpid(), argv=sys.argv, seen=seen)), flush=True)
sys.exit(7)
"""


@pytest.fixture
def served() -> Iterator[Served]:
    with endpoint_that_answers({"/v1/models": (200, json.dumps(LISTED).encode())}) as endpoint:
        yield endpoint


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a folder with stand-ins for all agents, as the only entry of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in Agent:
        (folder / agent).write_text(STAND_IN)
        (folder / agent).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def launch(*words: str) -> list[str]:
    return [sys.executable, "-m", "deploy", "launch", *words]


@pytest.mark.usefixtures("agents")
def test_agent_takes_its_place_and_no_file_is_written(served: Served, begin: Begin, tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for folder in (home, scratch):
        folder.mkdir()
    words = launch(Agent.PI, "--url", f"{served.url}/v1/", "--", "-p", "--model", "of the agent's")
    told = begin(words, env={"HOME": str(home), "TMPDIR": str(scratch)})
    assert told.wait() == 7
    found = json.loads(told.lines[0])
    assert found["pid"] == told.process.pid
    assert found["argv"][-3:] == ["-p", "--model", "of the agent's"]
    assert found["seen"]["HOME"] == str(home)
    assert [*home.rglob("*"), *scratch.rglob("*")] == []


@pytest.mark.usefixtures("agents")
def test_it_is_told_the_key_of_the_serve_that_it_finds(served: Served, begin: Begin, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("s3cret alice\n")
    port = served.url.rpartition(":")[2]
    file = config(tmp_path, f"[gateway]\nport = {port}\napi_keys_file = '{keys}'\n")
    told = begin(launch("codex", "--config", file), env={"ANTHROPIC_API_KEY": "kept"})
    assert told.wait() == 7
    seen = json.loads(told.lines[0])["seen"]
    assert (seen["ROUNDHOUSE_API_KEY"], seen["ANTHROPIC_API_KEY"]) == ("s3cret", "kept")
    assert served.asked == [("/health", "Bearer s3cret"), ("/v1/models", "Bearer s3cret")]


def test_a_key_of_a_file_is_not_sent_elsewhere(served: Served, tmp_path: Path) -> None:
    env = {"ROUNDHOUSE_CONFIG": config(tmp_path, "[serve]\napi_keys = ['s3cret']\n")}
    found = CliRunner().invoke(app, ["launch", "--print", "--url", served.url], env=env)
    assert found.exit_code == 0
    assert "s3cret" not in found.stdout
    assert served.asked == [("/health", None), ("/v1/models", None)]


def test_the_environment_is_printed_for_any_client(served: Served) -> None:
    found = CliRunner().invoke(app, ["launch", "--print", "--url", served.url, "--model", "other"])
    assert found.exit_code == 0
    assert f"export OPENAI_BASE_URL={served.url}/v1" in found.stdout.splitlines()
    assert f"export ANTHROPIC_BASE_URL={served.url}" in found.stdout.splitlines()
    assert "export OPENAI_MODEL=other" in found.stdout.splitlines()
    found = CliRunner().invoke(app, ["launch", "codex", "--print", "--url", served.url])
    assert found.stdout.splitlines()[-1].startswith("# codex -c "), "it starts no agent"


@pytest.mark.parametrize(
    ("words", "said"), [(["codex"], "cannot connect to"), (["codex", "--port", "0"], "port: ")]
)
def test_configuration_error_exits_with_78_and_one_line(words: list[str], said: str) -> None:
    environ = {"ROUNDHOUSE_PORT": str(free_port())}
    found = CliRunner().invoke(app, ["launch", *words], env=environ)
    assert found.exit_code == 78
    assert found.stderr.startswith("roundhouse launch: ")
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_agent_that_is_missing_or_not_named_is_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = CliRunner().invoke(app, ["launch", "codex", "--url", served.url])
    assert found.exit_code == 78
    assert "codex is not installed: npm install -g @openai/codex" in found.stderr
    found = CliRunner().invoke(app, ["launch", "--url", served.url])
    assert found.exit_code == 2
    assert "name an agent" in " ".join(found.stderr.split())
