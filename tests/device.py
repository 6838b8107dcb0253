"""What MLX's default device can do, asked: hosted Macs have a paravirtual GPU, which may lack types and
instructions. `python -m tests.device` prints what the device is and each answer, and with `--dtype` only the
type for a model: bfloat16, or else float16. Tests marked `bfloat16` are left out where it is missing."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache

import pytest

ANSWER_S_MAX = 120.0
_PRODUCTS = "assert not (wrong := compare(mx.{}, {}, shape=(8, 256, 480))), wrong"
_REDUCTIONS = """
rows = mx.random.normal((64, 1000), key=mx.random.key(1))
for reduce in (partial(mx.softmax, axis=-1), partial(mx.fast.rms_norm, weight=None, eps=1e-5), mx.mean):
    with mx.stream(mx.cpu):
        expected = reduce(rows)
    assert mx.allclose(reduce(rows), expected, atol=1e-5), reduce
"""
QUESTIONS = {
    "float32": _PRODUCTS.format("float32", None),
    "float16": _PRODUCTS.format("float16", None),
    "float16 in 4 bits": _PRODUCTS.format("float16", 4),
    "bfloat16": _PRODUCTS.format("bfloat16", None),
    "bfloat16 in 4 bits": _PRODUCTS.format("bfloat16", 4),
    "reductions": _REDUCTIONS,
}
"""Statements that fail on a device that cannot. Without float32 and reductions no model runs."""
_FIRST = """from functools import partial
import mlx.core as mx
from worker.load.exactness import compare
"""
_DEVICE = """import mlx.core as mx
print(f"{mx.default_device()}, Metal {'is' if mx.metal.is_available() else 'is not'} available")
print(mx.device_info())
"""


@cache
def lack(question: str) -> str:
    """Return why the device cannot do something; empty: it can. Asked in a process of its own, because a
    driver may end that."""
    try:
        _run(_FIRST + QUESTIONS[question])
    except (subprocess.SubprocessError, OSError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return str(reason).strip().splitlines()[-1]
    return ""


def _run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S_MAX)
    return done.stdout


def split(
    items: Sequence[pytest.Item], lack: Callable[[str], str] = lack, platform: str = sys.platform
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that the device can run, and the others. Only Macs are asked."""
    marked = [item for item in items if item.get_closest_marker("bfloat16")]
    if not marked or platform != "darwin" or not lack("bfloat16"):
        return list(items), []
    return [item for item in items if item not in marked], marked


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device")
    parser.add_argument("--dtype", action="store_true", help="print only the type for a model")
    if parser.parse_args().dtype:
        print("float16" if lack("bfloat16") or lack("bfloat16 in 4 bits") else "bfloat16")
        return
    print(_run(_DEVICE), end="")
    for question in QUESTIONS:
        print(f"{question}: {lack(question) or 'yes'}")


if __name__ == "__main__":
    main()
