"""What somebody new gets wrong: each mistake is answered at once, in a line or two that say what to do."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.command.cli import app
from worker.pocket import MODEL_PATH

pytestmark = pytest.mark.usefixtures("runtime_folder", "elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with models that are none, and files of settings that are wrong."""
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
    (["--xyzzy=3"], "--xyzzy: no such flag; roundhouse serve --help shows all"),
    (["--memory-headroom", "0.2"], "set ROUNDHOUSE_MEMORY_HEADROOM, or memory_headroom under [worker]"),
    (["8001"], "8001: nothing is expected there; roundhouse serve --help shows what is"),
    (["--port", "99999"], "port: Expected `int` <= 65535 (from --port)"),
    (["--config", "none.toml"], "none.toml: there is no such file or folder"),
    (["--config", "."], ".: that is a folder, and a file is wanted"),
    (["--config", "typo.toml"], "unknown key max_runing in [serve]; did you mean max_running?"),
    (["--config", "broken.toml"], "broken.toml is no TOML"),
    (["--api-keys-file", "none"], "none: there is no such file or folder"),
    (["--model", "./nowhere"], "there is no such folder. Name a model's folder or a Hugging Face id."),
    (["--model", "./weightles"], "did you mean weightless?"),
    (["--model", "./bare"], "there is no config.json in bare; name a model's folder"),
    (["--model", "./foreign"], "only .gguf, which MLX cannot load: take a conversion"),
    (["--model", "foreign/model-Q4.gguf"], "is a file, which MLX cannot load: take a conversion"),
    (["--model", "typo.toml"], "typo.toml is a file. Name a model's folder, with config.json in it."),
    (["--model", "./weightless"], "there are no weights (model*.safetensors) in weightless. Download"),
    (["--model", "./halfway"], "only .bin, which MLX cannot load: take a conversion"),
    (["--model", "./odd"], "odd/config.json: that is a folder, and a file is wanted"),
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


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_answered_with_another(taken: int) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", str(taken)])
    assert result.exit_code == 78
    [line] = result.stderr.splitlines()
    assert f"port {taken} is taken by another program" in line
    assert "which is free" in line


def test_a_folder_that_is_others_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)  # who runs the tests may read everything
    result = CliRunner().invoke(app, ["serve", "--model", "./bare"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (78, 1)
    assert "you may not read or write it: look at its permissions" in result.stderr


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
