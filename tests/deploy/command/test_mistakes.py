"""Mistakes of new users: each fails at once, with one or two lines that say what to do."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.serving.serve import own_settings
from deploy.serving.settings import ServeSettings
from protocol import settings
from protocol.gateway_settings import GatewaySettings
from protocol.settings import SettingsError
from protocol.worker_settings import WorkerSettings
from worker.pocket import MODEL_PATH

pytestmark = pytest.mark.usefixtures("runtime_folder", "elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder with invalid models and invalid settings files, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("bare", "foreign", "weightless", "halfway", "odd"):
        Path(name).mkdir()
    Path("foreign/model-Q4.gguf").touch()
    for name in ("weightless", "halfway"):
        shutil.copy(MODEL_PATH / "config.json", name)
    Path("halfway/pytorch_model.bin").touch()
    Path("odd/config.json").mkdir()
    Path("typo.toml").write_text("[serve]\nmax_runing = 3\n[serv]\n")
    Path("broken.toml").write_text("[serve\n")


MISTAKES = [
    (["--prot", "8001"], "--prot: no such flag; did you mean --port?"),
    (["--xyzzy=3"], "--xyzzy: no such flag; see roundhouse serve --help"),
    (["--memory-headroom", "0.2"], "set ROUNDHOUSE_MEMORY_HEADROOM, or memory_headroom under [worker]"),
    (["--body-timeout", "5"], "set ROUNDHOUSE_BODY_TIMEOUT, or body_timeout under [gateway] in the file"),
    (["--body-timeot=5"], "did you mean the setting body_timeout? If so, set ROUNDHOUSE_BODY_TIMEOUT, or"),
    (["8001"], "8001: unexpected argument; see roundhouse serve --help"),
    (["--port", "99999"], "port: Expected a whole number <= 65535 (from --port)"),
    (["--max-per-key", "many"], "max_per_key: Expected a whole number, got text (from --max-per-key)"),
    (["--log-format", "xml"], "log_format: Expected text or json, not 'xml' (from --log-format)"),
    (["--config", "none.toml"], "none.toml: no such file or folder"),
    (["--config", "."], ".: is a folder, but a file is required"),
    (["--config", "typo.toml"], "unknown key max_runing in [serve]; did you mean max_running?"),
    (["--config", "broken.toml"], "broken.toml is not valid TOML"),
    (["--api-keys-file", "none"], "none: no such file or folder"),
    (["--model", "./nowhere"], "no such folder. Give a model folder or a Hugging Face id."),
    (["--model", "./weightles"], "did you mean weightless?"),
    (["--model", "./bare"], "bare contains no config.json; give a model folder"),
    (["--model", "./foreign"], "only .gguf, which MLX cannot load: use a conversion"),
    (["--model", "foreign/model-Q4.gguf"], "is a file, which MLX cannot load: use a conversion"),
    (["--model", "typo.toml"], "typo.toml is a file. Give a model folder that contains config.json."),
    (["--model", "./weightless"], "weightless contains no weights (model*.safetensors). Download"),
    (["--model", "./halfway"], "only .bin, which MLX cannot load: use a conversion"),
    (["--model", "./odd"], "odd/config.json: is a folder, but a file is required"),
    (["--model", "a=./bare", "--model", "b=./bare", "--memory-budget", "much"], "memory_budget: "),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda each: " ".join(each)[:40])
def test_a_mistake_is_answered_with_what_to_do(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 78
    assert said in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) <= 2
    assert all(line.startswith("roundhouse serve: ") for line in lines)
    assert "Errno" not in result.stderr


@pytest.mark.parametrize(("section", "kind"), [("gateway", GatewaySettings), ("worker", WorkerSettings)])
def test_each_setting_that_serve_does_not_take_is_answered_with_its_own_way_in(
    section: str, kind: type[Struct]
) -> None:
    own = {name for flag in settings.flags(ServeSettings) for name in flag.names}
    others = [flag for flag in settings.flags(kind) if not own & set(flag.names)]
    assert others
    for flag in others:
        for name in flag.names:
            with pytest.raises(SettingsError) as caught:
                own_settings([name], {})
            way = f"set ROUNDHOUSE_{flag.field.upper()}, or {flag.field} under "
            assert str(caught.value).startswith(f"{name}: not a flag of this command; {way}")
            assert f"[{section}]" in str(caught.value)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_answered_with_another(taken: int) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", str(taken)])
    assert result.exit_code == 78
    [line] = result.stderr.splitlines()
    assert f"port {taken} is in use by another program" in line
    assert "which is free" in line


def test_a_folder_that_is_others_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)  # the user that runs the tests can read every file
    result = CliRunner().invoke(app, ["serve", "--model", "./bare"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (78, 1)
    assert "permission denied: check its permissions" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["srve"], "Did you mean 'serve'"),
        (["status", "--prot", "1"], "--port"),
        (["launch", "opncode"], "'opencode'"),
    ],
)
def test_a_command_that_is_misspelt_is_answered_with_one_that_is_there(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert said in result.stderr
