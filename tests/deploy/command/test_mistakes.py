"""Mistakes of new users: each fails at once, with one or two lines that say what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import Struct
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.serving.resolution import resolve_gateway
from deploy.serving.settings import shown_flags
from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings
from worker.pocket import MODEL_PATH

pytestmark = pytest.mark.usefixtures("runtime_folder", "elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder with invalid models and invalid settings files, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("bare", "foreign", "weightless"):
        Path(name).mkdir()
    Path("foreign/model-Q4.gguf").touch()
    shutil.copy(MODEL_PATH / "config.json", "weightless")
    Path("typo.toml").write_text("[serve]\nmax_runing = 3\n[serv]\n")
    Path("broken.toml").write_text("[serve\n")


MISTAKES = [
    (["--prot", "8001"], "--prot: no such flag; did you mean --port?"),
    (
        ["--max-model-len", "4096"],
        "--max-model-len: no such flag; another server's, here nothing: the context",
    ),
    (
        ["--served-model-name=x"],
        "--served-model-name: no such flag; another server's, here --model NAME=MODEL",
    ),
    (["--max-kv-size", "9"], "--max-kv-size: no such flag; it was removed: --kv-bits takes less memory"),
    (["--body-timeot=5"], "did you mean the setting body_timeout? If so, set ROUNDHOUSE_BODY_TIMEOUT, or"),
    (["8001"], "8001: unexpected argument; see roundhouse serve --help"),
    (["--config", "typo.toml"], "unknown key max_runing in [serve]; did you mean max_running?"),
    (["--config", "broken.toml"], "broken.toml is not valid TOML"),
    (["--model", "./nowhere"], "no such folder. Give a model folder or a Hugging Face id."),
    (["--model", "./bare"], "bare contains no config.json; give a model folder"),
    (["--model", "./foreign"], "only .gguf, which MLX cannot load: use a conversion"),
    (["--model", "foreign/model-Q4.gguf"], "is a file, which MLX cannot load: use a conversion"),
    (["--model", "./weightless"], "weightless contains no weights (model*.safetensors). Download"),
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
def test_setting_of_one_process_is_answered_with_its_own_way_in(section: str, kind: type[Struct]) -> None:
    own = {name for flag in shown_flags() for name in flag.names}
    others = [flag for flag in settings.flags(kind) if not own & set(flag.names)]
    assert others
    for flag in others:
        for name in flag.names:
            with pytest.raises(SettingsError) as caught:
                resolve_gateway([name], {})
            way = f"set ROUNDHOUSE_{flag.field.upper()}, or {flag.field} under "
            assert str(caught.value).startswith(f"{name}: not a flag of this command; {way}")
            assert f"[{section}]" in str(caught.value)
