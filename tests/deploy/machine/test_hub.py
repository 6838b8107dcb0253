"""`pull`, `ls` and `rm` with a local hub: files fetched, listed and removed, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS
from typer.testing import CliRunner

from deploy.command.cli import app
from deploy.machine import hub
from deploy.machine.hub import HubError
from tests.deploy.machine.hub_played import SHA, hub_that_has

WAIT_S = 60.0
MODEL = "org/small-4bit"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 5000,
    "tokenizer.json": b"{}",
    "original.bin": b"not for MLX",
}

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def command(tmp_path: Path, asked: list[str]) -> Iterator[Command]:
    """Run `roundhouse words…` with this hub and an empty cache. `asked` gets the hub's requests."""
    with hub_that_has({MODEL: FILES}) as (url, requests):
        env = os.environ | {
            "HF_ENDPOINT": url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        env.pop("HF_HUB_OFFLINE", None)

        def run(*words: str, typed: str = "", **more: str) -> subprocess.CompletedProcess[str]:
            requests.clear()
            done = subprocess.run(
                [sys.executable, "-m", "deploy", *words],
                input=typed,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                env=env | more,
            )
            asked[:] = requests
            return done

        yield run


def test_model_is_fetched_once_shown_and_removed(command: Command, asked: list[str], tmp_path: Path) -> None:
    def fetched() -> bool:
        return any(each.startswith("GET") and each.endswith("model.safetensors") for each in asked)

    pulled = command("pull", MODEL)
    assert pulled.returncode == 0, pulled.stderr
    assert f"roundhouse serve --model {MODEL}" in pulled.stdout
    assert fetched()
    snapshot = tmp_path / "hub" / "models--org--small-4bit" / "snapshots" / SHA
    assert {path.name for path in snapshot.iterdir()} == FILES.keys() - {"original.bin"}
    assert (snapshot / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    for words in (["pull", MODEL, "org/small-4bt"], ["rm", MODEL, "org/smal-4bit", "--yes"]):
        wrong = command(*words)
        assert (wrong.returncode, f"did you mean {MODEL}?" in wrong.stderr.splitlines()[-1]) == (78, True)
        assert (f"{MODEL} is in {snapshot}" in wrong.stdout) == (words[0] == "pull")
        assert not fetched()
    assert MODEL in command("ls").stdout
    assert command("rm", MODEL, typed="n\n").returncode == 1
    assert snapshot.exists()
    assert command("rm", MODEL, "--yes").returncode == 0
    assert not snapshot.exists()
    assert "no models in" in command("ls").stdout


def test_without_a_name_those_that_fit_are_told_and_an_invalid_one_is_refused() -> None:
    told = CliRunner().invoke(app, ["pull", "not a name/at all/here"])
    assert (told.exit_code, "OWNER/NAME" in told.stderr) == (78, True)
    told = CliRunner().invoke(app, ["pull"])
    assert (told.exit_code, "for a model and its caches" in told.stdout) == (0, True)


def test_the_files_that_are_fetched_are_those_that_upstream_loads() -> None:
    assert list(hub.PATTERNS) == DEFAULT_ALLOW_PATTERNS


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched() -> None:
    hub.check_room(MODEL, 10**9, 10**9 + hub.MARGIN_BYTES)
    with pytest.raises(HubError, match=r"needs 1\.0 GB more"):
        hub.check_room(MODEL, 10**9, 10**9)
