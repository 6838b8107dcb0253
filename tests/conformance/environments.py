"""Environments of drivers: made once under one folder, and again when their packages change."""

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
"""What drivers that ask for it wait for an answer: behind many tools, the embedded model takes a minute for
one on a busy CPU."""
INSTALLED = Path(".venv") / "conformance"

UV = os.environ.get("UV", "uv")
"""A path, or a name."""
PROGRAMS = {"python": (UV,), "javascript": ("npm", "node")}
"""What an environment of each language cannot be made or used without."""


class NotMade(Exception):
    """An environment; with what the package manager said."""


def missing(environment: Environment) -> str | None:
    """A program that is not installed, and that it needs."""
    return next((name for name in PROGRAMS[environment.language] if shutil.which(name) is None), None)


def make(environment: Environment, folder: Path) -> Path:
    """Its place in `folder`, where all that the table names is installed. Raises `NotMade`."""
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
    python = str(_interpreter(place))
    return [
        [UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)],
        [UV, "pip", "install", "--quiet", "--python", python, *_overrides(place), *environment.packages],
    ]


def _overrides(place: Path) -> list[str]:
    return ["--override", str(place / ".overrides")]


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
    """What runs a driver in its environment. What JavaScript imports is looked for beside the program and
    above it: for that long, it and its neighbours are copied there."""
    if driver.environment.language == "python":
        yield [str(_interpreter(place)), str(driver.path)]
        return
    with tempfile.TemporaryDirectory(dir=place) as copied:
        for path in driver.path.parent.glob("*.mjs"):
            shutil.copy(path, copied)
        yield ["node", str(Path(copied) / driver.name)]


def variables(place: Path, url: str) -> Mapping[str, str]:
    """A driver's: ours, whatever flags it knows among them, without what would lead it elsewhere."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    told = {
        "TIMEOUT": ours.get("TIMEOUT", str(ANSWER_S_MAX)),
        "BASE_URL": url,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return ours | told | {"PYTHONPYCACHEPREFIX": str(place / "bytecode")}
