"""Run the commands in the README and the documents unchanged, but for the port, against one server.

Commands that would start services are replaced (`PLAYED`); `NOT_RUN` has those that cannot be run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.agents.profiles import Agent
from deploy.serving.resolution import resolve
from tests.blocks import ROOT, Block, all_blocks, blocks
from tests.conformance.recipes import ENVIRONMENTS
from tests.ports import free_port
from tests.system import NO_TLS, START_S_MAX, STOP_S_MAX, Process, eventually, is_ready

BLOCK_S_MAX = 300

SERVED = '[serve]\nspare = 0\n[models.pocket]\naliases = ["small"]\n'
"""The embedded model, with an alias for the small model of the documents. No reload here needs a spare."""

NOT_RUN: Mapping[str, str] = {
    "sudo sysctl iogpu.wired_limit_mb=27852             # 85% of 32 GB; 0: the default": "macOS only",
    "roundhouse pull mlx-community/Qwen3.5-9B-4bit      # 6.0 GB; resumes a partial download": "a download",
    "roundhouse pull mlx-community/Qwen3-1.7B-4bit                   # 1 GB": "a download",
    "roundhouse doctor --model mlx-community/Qwen3-1.7B-4bit --report doctor.json": "a download",
    "roundhouse serve --model mlx-community/Qwen3-1.7B-4bit": "its last command kills every worker",
    "roundhouse bench --share figures.json": "tests/deploy/load measures its figures, which take minutes",
    "roundhouse adapters list": "the embedded model has no adapter",
    "roundhouse doctor --model mlx-community/Qwen3-8B-4bit": "a download",
    "curl -N http://127.0.0.1:8000/v1/models/pull -d "
    '\'{"model": "mlx-community/SmolLM2-135M-Instruct", "stream": true}\'': "a download",
    "roundhouse reload": "it is the second half of the block above it",
}
"""Reasons why blocks cannot be run here, or need not be, by their first lines."""

PLAYED = {
    # The arguments of `serve` are only checked, by the test, because the models of the documents are missing.
    "roundhouse": """
case "$1" in
serve) shift; printf '%s\\0' "$@" >> served; echo >> served; exit 0 ;;
bench) exec "$PYTHON" -m deploy "$@" $BRIEFLY ;;
service) [ "$2" = install ] && exec "$PYTHON" -m deploy "$@" --dry-run ;;
esac
exec "$PYTHON" -m deploy "$@"
""",
    # Only check that the target exists, by printing its recipe.
    "make": """
for word in "$@"; do
  case "$word" in ARGS=*) roundhouse serve ${word#ARGS=} || exit 1 ;; esac
done
exec "$MAKE_OF_SYSTEM" -n -C "$ROOT" "$@"
""",
    **dict.fromkeys(Agent, "exit 0\n"),
}
"""Shell scripts that replace programs."""
BRIEFLY = "--requests 1 --rounds 1 --concurrency 1 --prompt-tokens 40 --shared-tokens 8 --answer-tokens 4"

IN_ONE_PROCESS = """
import json, sys
for place, text in json.load(sys.stdin):
    print("running", place, file=sys.stderr)
    exec(compile(text, place, "exec"), {"__name__": "__main__"})
"""
"""Runs blocks of Python, each with names of its own: importing the SDKs takes longer than the blocks do."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The environment of a reader who tries the documents: project, programs and server address."""

    address: str
    project: Path
    env: Mapping[str, str]

    def run(self, block: Block) -> subprocess.CompletedProcess[str]:
        text = block.at(self.address).replace("127.0.0.1:8080", self.address)
        return self._run(["bash", "-euc", text])

    def run_python(self, known: Sequence[Block]) -> subprocess.CompletedProcess[str]:
        """Run blocks one after another, until one fails."""
        texts = [(block.place, block.at(self.address)) for block in known]
        return self._run([sys.executable, "-c", IN_ONE_PROCESS], json.dumps(texts))

    def _run(self, command: Sequence[str], typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.project,
            env=dict(self.env),
            input=typed,
            capture_output=True,
            text=True,
            timeout=BLOCK_S_MAX,
        )

    def check_served(self) -> None:
        """Check the arguments of each `serve` of the last block. Raises `SettingsError`."""
        served = self.project / "served"
        if served.exists():
            for words in served.read_text().removesuffix("\0\n").split("\0\n"):
                resolve(words.split("\0"), self.env)
            served.unlink()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Yield a reader with a running `roundhouse serve`."""
    home, port = tmp_path_factory.mktemp("reader"), free_port()
    config = home / "roundhouse.toml"
    config.write_text(SERVED)
    _share_kernels(home)
    own = {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home),
        "TMPDIR": str(home),
        "ROUNDHOUSE_PORT": str(port),
        "PATH": os.pathsep.join((str(_programs(home)), os.environ["PATH"])),
        "PYTHON": sys.executable,
        "ROOT": str(ROOT),
        "PYTHONPATH": str(ROOT),
        "MAKE_OF_SYSTEM": shutil.which("make") or "make",
        "BRIEFLY": BRIEFLY,
    }
    others = {*psutil.Process().children(recursive=True)}
    server = Process("server", ["deploy", "serve", "--config", str(config)], home, own)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS) as http:
            eventually(lambda: _ready(server, http), within_s=START_S_MAX, what=server.log())
        yield Reader(f"127.0.0.1:{port}", _project(home), os.environ | own)
    finally:
        server.stop()
    eventually(lambda: {*psutil.Process().children(recursive=True)} <= others, within_s=STOP_S_MAX)


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Override the fixture of all tests: a reload replaces processes of the server, which end with it."""


def _share_kernels(home: Path) -> None:
    """Share MLX's compiled CPU kernels, which are in the temporary folder, with the reader's own one.

    Each kernel takes the compiler half a second.
    """
    kernels = Path(tempfile.gettempdir()) / "mlx"
    kernels.mkdir(exist_ok=True)
    (home / "mlx").symlink_to(kernels)


def _ready(server: Process, http: httpx.Client) -> bool:
    assert server.running, server.log()
    return is_ready(http)


def _programs(home: Path) -> Path:
    folder = home / "programs"
    folder.mkdir()
    for name, text in PLAYED.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{text}")
        program.chmod(0o755)
    return folder


def _project(home: Path) -> Path:
    """Create a git repository with an uncommitted change."""
    project = home / "project"
    project.mkdir()
    (project / "notes.txt").write_text("one\n")
    for words in (["init", "-q"], ["add", "notes.txt"]):
        subprocess.run(["git", *words], cwd=project, check=True, capture_output=True)
    (project / "notes.txt").write_text("two\n")
    return project


RUN = [block for block in all_blocks() if not block.environment and block.first not in NOT_RUN]
COMMANDS = [block for block in RUN if block.language == "bash"]
PYTHON = [block for block in RUN if block.language == "python"]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.place)
def test_a_command_of_the_documents_works(block: Block, reader: Reader) -> None:
    done = reader.run(block)
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    reader.check_served()


def test_the_python_of_the_documents_works(reader: Reader) -> None:
    assert PYTHON
    done = reader.run_python(PYTHON)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


def test_the_first_answer_is_the_one_that_the_readme_shows(reader: Reader) -> None:
    asked = next(block for block in blocks(ROOT / "README.md") if block.first.startswith("curl"))
    answer = json.loads(reader.run(asked).stdout)
    shown = (ROOT / "README.md").read_text().replace("\n", "")
    assert f'"content":{json.dumps(answer["choices"][0]["message"]["content"])}' in shown
    assert f'"model":"{answer["model"]}"' in shown


def test_blocks_that_are_not_run_are_known_and_valid(tmp_path: Path) -> None:
    known = all_blocks()
    assert set(NOT_RUN) <= {block.first for block in known}
    for number, block in enumerate(known):
        assert block.language in ("bash", "python", "js", "json", "toml"), block.place
        assert block.environment in (*ENVIRONMENTS, ""), block.place
        assert block.environment or block.language != "js", block.place
        if block.language == "json":
            assert json.loads(block.text), block.place
        if block.language == "toml":
            file = tmp_path / f"{number}.toml"
            file.write_text(block.text)
            resolve([f"--config={file}"], {"XDG_RUNTIME_DIR": str(tmp_path)})
