"""The wheel in an empty environment: installed, served with the embedded model, and asked.

`make release` does so with the locked versions for each Python. `python -m recipes.installed` does so with
the newest versions that the wheel's bounds allow (`make conformance LANES=newest`), and tells which of them
the lock does not have.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.wheel import WheelBuilder
from PIL import Image

from recipes.homebrew import LOCK, ROOT, locked_hashes

INSTALL_S_MAX = 1200.0
"""Maximum duration of a command of uv, with downloads."""
READY_S_MAX = 300.0
ANSWER_S_MAX = 120.0
STOP_S_MAX = 60.0
_POLL_S = 0.2
_LOG_CHARACTERS = 4000


class InstallError(Exception):
    """The installation does not work; the message says how."""


def make_environment(uv: str, folder: Path, python: str) -> Path:
    """Make an empty environment of a Python (a path, or a version that uv may download) and return its
    interpreter."""
    _run([uv, "venv", "--quiet", f"--python={python}", str(folder)])
    return folder / "bin" / "python"


def install_locked(uv: str, python: Path, requirements: Path, wheel: Path) -> None:
    """Install what a hashed list of packages names, and a wheel, without asking for dependencies."""
    install = [uv, "pip", "install", "--quiet", f"--python={python}", "--no-deps"]
    _run([*install, "--require-hashes", "-r", str(requirements)])
    _run([*install, str(wheel)])


def install_newest(uv: str, python: Path, wheel: Path) -> dict[str, str]:
    """Install a wheel with the newest dependencies that its bounds allow, and return their versions."""
    install = [uv, "pip", "install", "--quiet", f"--python={python}", "--resolution=highest", "--upgrade"]
    _run([*install, str(wheel)])
    listed = _run([uv, "pip", "list", f"--python={python}", "--format=json"])
    return {each["name"]: each["version"] for each in json.loads(listed)}


def check(python: Path) -> None:
    """Serve the embedded model from the environment of an interpreter, and ask it. Raises `InstallError`."""
    command = str(python.with_name("roundhouse"))
    with tempfile.TemporaryDirectory(prefix="rh-") as place:
        environ = _environ(Path(place))
        _run([command, "--version"], cwd=place, env=environ)
        with _serving(command, Path(place), environ) as url:
            if "Ada" not in (text := _ask(url, "My name is Ada. What is my name?")):
                raise InstallError(f"the embedded model answered {text!r}")
            _ask(url, [{"type": "image_url", "image_url": {"url": _picture()}}])


def _environ(place: Path) -> dict[str, str]:
    """Return this process' variables without those of its tree, and with empty folders for a user's files."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROUNDHOUSE_"))
    }
    return kept | {f"XDG_{kind}_HOME": str(place / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")}


@contextlib.contextmanager
def _serving(command: str, place: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Serve the embedded model until the block ends, and then require that all ends well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = place / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [command, "serve", f"--port={port}"], cwd=place, env=environ, stdout=written, stderr=written
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        if status := process.wait(STOP_S_MAX):
            raise InstallError(f"it ended with status {status}")
    except (InstallError, OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{error}\n{log.read_text(errors='replace')[-_LOG_CHARACTERS:]}") from None
    finally:
        process.kill()
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S_MAX
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=ANSWER_S_MAX):
            return
        time.sleep(_POLL_S)
    raise InstallError(f"it was not ready within {READY_S_MAX:.0f} s, or ended (status {process.poll()})")


def _ask(url: str, content: str | list[dict[str, Any]]) -> str:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text


def _picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _run(command: list[str], **where: Any) -> str:
    """Run a command and return its output. Raises `InstallError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX, **where)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise InstallError(f"{' '.join(command[:3])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def newer_than_locked(versions: Mapping[str, str], lock: str) -> list[str]:
    """Return the packages whose versions a lock does not have, and `(not locked)` where it has none."""
    locked: dict[str, list[str]] = {}
    for name in locked_hashes(lock):
        locked.setdefault(name.partition("==")[0], []).append(name.partition("==")[2])
    return [
        f"{name} {version} ({', '.join(locked.get(name, ['not'])).strip()} locked)"
        for name, version in sorted(versions.items())
        if version not in locked.get(name, [])
    ]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uv, place = os.environ.get("UV", "uv"), Path(folder)
        wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=folder)))
        python = make_environment(uv, place / "env", sys.executable)
        versions = install_newest(uv, python, wheel)
        print(*newer_than_locked(versions, LOCK.read_text()), sep="\n")
        check(python)
        print(f"{len(versions)} packages: served")


if __name__ == "__main__":
    try:
        main()
    except InstallError as error:
        raise SystemExit(str(error)) from None
