"""The wheel, installed from its registry into fresh environments by pip and by uv, serves one request each.

    make conformance LANES=install

Downloads about 0.3 GB for each; `tests/deploy/test_wheel.py` runs the same wheel without a download.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from hatchling.builders.wheel import WheelBuilder

from tests.ports import free_port
from tests.system import NO_TLS, START_S_MAX, chat_body, eventually

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S_MAX = 900
STOP_S_MAX = 60
QUESTION, ANSWER = "My name is Ada. What is my name?", "Ada"


def by_pip(wheel: Path, folder: Path) -> None:
    _run(sys.executable, "-m", "venv", folder)
    _run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)


def by_uv(wheel: Path, folder: Path) -> None:
    uv = os.environ.get("UV", "uv")
    _run(uv, "venv", "--quiet", folder)
    _run(uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", wheel)


WAYS: Mapping[str, Callable[[Path, Path], None]] = {"pip": by_pip, "uv": by_uv}


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, timeout=INSTALL_S_MAX, env=_environ())


def _environ() -> dict[str, str]:
    """Return the environment without what would show our checkout to another Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def check(command: Path, folder: Path) -> None:
    """Ask the installed command for its version, and its server a question. Raises if one fails."""
    environ = _environ() | {"XDG_CACHE_HOME": str(folder / "cache")}
    shown = subprocess.run(
        [command, "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=environ,
    )
    assert shown.stdout.startswith("roundhouse "), shown.stdout
    port = free_port()
    server = subprocess.Popen([command, "serve", f"--port={port}", "--spare=0"], cwd=folder, env=environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=NO_TLS) as http:
            eventually(lambda: _is_ready(http), within_s=START_S_MAX, what="the installed server is ready")
            reply = http.post("/v1/chat/completions", json=chat_body(QUESTION)).json()
        assert ANSWER in reply["choices"][0]["message"]["content"], reply
    finally:
        server.terminate()
        assert server.wait(STOP_S_MAX) == 0


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def main() -> int:
    """Run all ways; return 1 if one failed."""
    argparse.ArgumentParser(prog="tests.conformance.install", description=__doc__).parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"))))
        for name, install in WAYS.items():
            try:
                install(wheel, folder / name)
                check(folder / name / "bin" / "roundhouse", folder)
            except (OSError, subprocess.SubprocessError, AssertionError) as error:
                failed.append(name)
                print(f"{name}: {error}", flush=True)
            else:
                print(f"{name}: installed, and it answers", flush=True)
    print(f"{len(WAYS) - len(failed)}/{len(WAYS)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
