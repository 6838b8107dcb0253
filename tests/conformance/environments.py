"""Environments of drivers: installed once in one folder, and again when their packages change."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conformance.drivers import Driver, Environment

INSTALL_S_MAX = 600
ANSWER_S_MAX = 240
"""Timeout of an answer for drivers that support one: with many tools, the embedded model takes a minute on a
busy CPU."""
INSTALLED = Path(os.environ.get("CONFORMANCE_DIR", ".venv/conformance"))

UV = os.environ.get("UV", "uv")
"""A path or a name."""
PROGRAMS = {"python": (UV,), "javascript": ("npm", "node")}
"""Programs that the environments of each language require."""


class NotMade(Exception):
    """An environment could not be installed; with the package manager's output."""


def missing(environment: Environment) -> str | None:
    return next((name for name in PROGRAMS[environment.language] if shutil.which(name) is None), None)


def make(environment: Environment, folder: Path) -> Path:
    """Install the packages of an environment below `folder` and return its place. Raises `NotMade`."""
    place = folder.resolve() / environment.name
    stamp, wanted = place / ".packages", "\n".join((*environment.packages, *environment.without))
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        left_out = [f"{name}; python_version < '3'\n" for name in environment.without]
        (place / ".overrides").write_text("".join(left_out))
        for command in _commands(environment, place):
            _install(command)
        stamp.write_text(wanted)
    return place


def _commands(environment: Environment, place: Path) -> list[list[str]]:
    if environment.language == "javascript":
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place)]
        return [[*npm, *environment.packages]]
    python, overrides = str(_interpreter(place)), ["--override", str(place / ".overrides")]
    return [
        [UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)],
        [UV, "pip", "install", "--quiet", "--python", python, *overrides, *environment.packages],
    ]


def _install(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        raise NotMade(f"{error}\n{said}") from error


def _interpreter(place: Path) -> Path:
    return place / "bin" / "python"


@contextlib.contextmanager
def command_of(driver: Driver, place: Path) -> Iterator[list[str]]:
    """Yield the command that runs a driver in its environment.

    JavaScript resolves imports from the program's folder upwards, so the driver's folder is copied meanwhile.
    """
    if driver.environment.language == "python":
        yield [str(_interpreter(place)), str(driver.path)]
        return
    with tempfile.TemporaryDirectory(dir=place) as copied:
        for path in driver.path.parent.glob("*.mjs"):
            shutil.copy(path, copied)
        yield ["node", str(Path(copied) / driver.name)]


def variables(place: Path, url: str) -> Mapping[str, str]:
    """Return a driver's environment variables: this process's, without PYTHONPATH and PYTHONHOME."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    told = {
        "TIMEOUT": ours.get("TIMEOUT", str(ANSWER_S_MAX)),
        "BASE_URL": url,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return ours | told | {"PYTHONPYCACHEPREFIX": str(place / "bytecode")}
