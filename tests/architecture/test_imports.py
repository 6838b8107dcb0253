"""Import rules: one direction only, MLX only where the model runs, no I/O library in the pure cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100

MODEL_LIBRARIES = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "numpy", "torch")

WITHOUT_MODEL = {
    "protocol": ("common.logs", "errors", "lifeline", "messages", "settings.reader", "sockets", "wire"),
    "broker": ("__main__",),
    "deploy": ("command.cli",),
    # A worker does its set-up before it imports MLX, and the scripted worker never needs MLX.
    "worker": ("__main__", "ranks.loader", "interfaces", "values", "gateway.service"),
}

IMPURE = ("zmq", "asyncio", "uvicorn", "starlette", *MODEL_LIBRARIES)

PURE = {
    "protocol": ("errors", "messages", "settings.reader", "wire"),
    "broker.dispatch": ("dispatcher",),
    "broker.api": ("chat.chat", "completions.completions", "rendering"),
    "broker.dialects": ("normalize", "data_urls", "choices"),
    "deploy.supervisor": ("lifecycle",),
    "worker": ("interfaces", "values"),
    "worker.core": ("engine_core",),
    "worker.runner": ("kv.buckets",),
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
    assert not forbidden & set(sys.modules), (name, forbidden & set(sys.modules))
"""


def import_without(modules: Sequence[str], forbidden: Sequence[str]) -> str:
    """Return the error of a fresh interpreter that imports `modules` without `forbidden`, or ""."""
    command = [sys.executable, "-c", IMPORT_WITHOUT, " ".join(modules), " ".join(forbidden)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return "" if ended.returncode == 0 else ended.stderr[-2000:] or f"status {ended.returncode}"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [(WITHOUT_MODEL, MODEL_LIBRARIES), (PURE, IMPURE)],
    ids=["no model's libraries", "no sockets, loops and servers"],
)
def test_modules_do_without_what_their_process_does_not_need(
    modules: Mapping[str, Sequence[str]], forbidden: Sequence[str]
) -> None:
    names = [f"{package}.{name}" for package, found in modules.items() for name in found]
    assert import_without(names, forbidden) == ""


def test_a_forbidden_import_would_be_noticed() -> None:
    assert "zmq is imported" in import_without(["protocol.wire", "broker.transport.router"], ["zmq"])
    assert "No module named" in import_without(["broker.no_such_module"], [])
