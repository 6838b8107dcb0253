"""Imports run one way, MLX stays where the model runs, and the pure cores stay pure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100

MODEL_LIBRARIES = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "numpy", "torch")

WITHOUT_MODEL = {
    "protocol": ("errors", "lifeline", "logs", "messages", "settings", "sockets", "wire"),
    "broker": ("__main__",),
    "deploy": ("command.cli",),
    # A worker sets things up before MLX is imported, and the scripted one never needs it.
    "worker": ("__main__", "config", "contract", "fake.__main__", "line.service"),
}

IMPURE = ("zmq", "asyncio", "uvicorn", "starlette", *MODEL_LIBRARIES)

PURE = {
    "protocol": ("errors", "messages", "sizes", "wire"),
    "broker.dispatch": ("dispatcher",),
    "broker.dialects": ("normalize", "media", "chat", "answer", "completions"),
    "deploy.supervisor": ("lifecycle",),
    "worker": ("contract",),
    "worker.schedule": ("loop",),
    "worker.engine": ("caches.grouping",),
}

IMPORT_WITHOUT = """
import importlib, sys

names, forbidden = sys.argv[1].split(), set(sys.argv[2].split())

class Doorman:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in forbidden:
            raise ImportError(f"{fullname} is imported")

sys.meta_path.insert(0, Doorman())
for name in names:
    importlib.import_module(name)
assert not forbidden & set(sys.modules), forbidden & set(sys.modules)
"""


def import_without(modules: Sequence[str], forbidden: Sequence[str]) -> str:
    """What goes wrong when a fresh interpreter that lacks `forbidden` imports `modules`; or nothing."""
    command = [sys.executable, "-c", IMPORT_WITHOUT, " ".join(modules), " ".join(forbidden)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return "" if ended.returncode == 0 else ended.stderr[-2000:] or f"status {ended.returncode}"


@pytest.mark.parametrize(("package", "modules"), WITHOUT_MODEL.items(), ids=WITHOUT_MODEL)
def test_a_process_that_runs_no_model_does_without_its_libraries(
    package: str, modules: Sequence[str]
) -> None:
    assert import_without([f"{package}.{name}" for name in modules], MODEL_LIBRARIES) == ""


@pytest.mark.parametrize(("package", "modules"), PURE.items(), ids=PURE)
def test_a_pure_core_does_without_sockets_loops_and_servers(package: str, modules: Sequence[str]) -> None:
    assert import_without([f"{package}.{name}" for name in modules], IMPURE) == ""


def test_a_forbidden_import_would_be_noticed() -> None:
    assert "zmq is imported" in import_without(["protocol.wire", "broker.line.link"], ["zmq"])
    assert "No module named" in import_without(["broker.no_such_module"], [])
