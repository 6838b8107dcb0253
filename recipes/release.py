"""A release, in a folder: `make release [ARGS="--key ~/.ssh/id_ed25519"]`.

Wheel and source are built, and the wheel again from the source, which must give the same bytes. The wheel and
the locked packages are installed into an empty environment of each Python, served and asked. These packages
are `requirements.txt`, with hashes, and `constraints.txt` without, as `pip install -c` wants them. The notes
are the version's section of CHANGELOG.md. `SHA256SUMS` names every file, and an SSH key signs it. Nothing is
published: the commands for that are printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from recipes import homebrew, installed
from recipes.homebrew import EXCLUDES, LOCK, ROOT, digest, own_version

CHANGELOG = ROOT / "CHANGELOG.md"
SUMS = "SHA256SUMS"
NAMESPACE = "file"
"""What a signature is for, as `ssh-keygen -Y` calls it; `file` is that of its own documentation."""
SIGNER = "roundhouse"
"""The name under which the list of allowed signers has the key."""
SIGN_S_MAX = 120.0
"""Time to sign, in which a passphrase may be typed."""


_INSTALL = """
## Install and verify

    pip install -c constraints.txt mlx-roundhouse=={version}
    uv tool install mlx-roundhouse=={version} -c constraints.txt --excludes excludes.txt  # the lightest
    pip install --no-deps --require-hashes -r requirements.txt && pip install --no-deps *.whl
    shasum -a 256 --check SHA256SUMS
    ssh-keygen -Y verify -f allowed_signers -I roundhouse -n file -s SHA256SUMS.sig < SHA256SUMS
"""
"""The end of the notes. `allowed_signers`: `roundhouse` and the public key, as published elsewhere."""


class ReleaseError(Exception):
    """There is no release; the message says why."""


def build(folder: Path) -> Path:
    """Build wheel and source into a folder, and return the wheel. Raises `ReleaseError` unless the source
    builds the same wheel."""
    wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder))))
    source = Path(next(SdistBuilder(str(ROOT)).build(directory=str(folder))))
    with tempfile.TemporaryDirectory() as place, tarfile.open(source) as packed:
        packed.extractall(place, filter="data")
        (unpacked,) = Path(place).iterdir()
        again = Path(next(WheelBuilder(str(unpacked)).build(directory=place)))
        if again.read_bytes() != wheel.read_bytes():
            raise ReleaseError(f"{source.name} does not build the same wheel as the tree")
    return wheel


def write_requirements(file: Path, uv: str) -> None:
    """Write the locked packages of the wheel to a file, with hashes, for every system and Python."""
    words = ["pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]
    words += ["--no-annotate", "--no-header", "--no-emit-index-url", f"--output-file={file}"]
    words += [f"--constraints={LOCK}", f"--excludes={EXCLUDES}", str(ROOT / "pyproject.toml")]
    subprocess.run([uv, *words], check=True, timeout=homebrew.RESOLVE_S_MAX, capture_output=True)


def without_hashes(requirements: str) -> str:
    """Return a list of packages without their hashes, which pip does not take in constraints."""
    return re.sub(r" \\\n\s+--hash=\S+", "", requirements)


def notes_of(changelog: str, version: str) -> tuple[str, bool]:
    """Return a version's section of the changelog, and whether it has one: without, that of *Unreleased*."""
    sections = {
        match[1]: match[2].strip()
        for match in re.finditer(
            r"^## \[([^]]+)\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
        )
    }
    return sections.get(version) or sections.get("Unreleased", ""), version in sections


def sums_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of each file, as `sha256sum --check` and `shasum --check` read them."""
    return "".join(f"{digest(file.read_bytes())}  {file.name}\n" for file in files)


def sign(file: Path, key: Path) -> Path:
    """Sign a file with an SSH key, verify it, and return the signature. Raises `ReleaseError`."""
    signature = file.with_name(f"{file.name}.sig")
    signature.unlink(missing_ok=True)
    _ssh_keygen("-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(file))
    verify(file, signature, key.with_name(f"{key.name}.pub").read_text())
    return signature


def verify(file: Path, signature: Path, public_key: str) -> None:
    """Raise `ReleaseError` unless a signature is that of a public key for a file."""
    with tempfile.TemporaryDirectory() as place:
        allowed = Path(place) / "allowed_signers"
        allowed.write_text(f"{SIGNER} {public_key}")
        words = ["-f", str(allowed), "-I", SIGNER, "-n", NAMESPACE, "-s", str(signature)]
        _ssh_keygen("-Y", "verify", *words, stdin=file)


def _ssh_keygen(*words: str, stdin: Path | None = None) -> None:
    given = stdin.read_bytes() if stdin else None
    try:
        done = subprocess.run(["ssh-keygen", *words], input=given, capture_output=True, timeout=SIGN_S_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"ssh-keygen: {error}") from None
    if done.returncode:
        raise ReleaseError(f"ssh-keygen: {(done.stderr or done.stdout).decode(errors='replace').strip()}")


def pythons() -> list[str]:
    """Return the versions of Python that the package names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))


def check(uv: str, python: str, requirements: Path, wheel: Path) -> str:
    """Install and ask the wheel in an empty environment, and return what that took. Raises `InstallError`."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        interpreter = installed.make_environment(uv, Path(folder) / "env", python)
        installed.install_locked(uv, interpreter, requirements, wheel)
        size = sum(file.lstat().st_size for file in Path(folder).rglob("*") if file.is_file())
        installed.check(interpreter)
    return f"Python {python}: served, {size / 10**6:.0f} MB, {time.monotonic() - begun:.0f} s"


def next_steps(version: str, folder: Path, is_final: bool, is_signed: bool) -> list[str]:
    """Return what is left to do, as commands; what is missing before them, as comments."""
    if not is_final:
        return [f"# CHANGELOG.md has no section [{version}]: rename [Unreleased], and make release again"]
    unsigned = [] if is_signed else ['# not signed: make release ARGS="--key ~/.ssh/id_ed25519"']
    return [
        *unsigned,
        f"git tag --sign v{version} --file {folder}/NOTES.md && git push origin v{version}",
        f"uv publish {folder}/*.whl {folder}/*.tar.gz",
        f"gh release create v{version} --notes-file {folder}/NOTES.md {folder}/*",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.release")
    parser.add_argument("folder", nargs="?", type=Path, help="where to; by default dist/VERSION")
    parser.add_argument("--key", type=Path, help="the SSH key that signs, with its public key beside it")
    parser.add_argument("--python", action="append", help="a version to check; by default all that are named")
    given = parser.parse_args()
    uv, version = os.environ.get("UV", "uv"), own_version()
    folder: Path = given.folder or Path("dist") / version
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel, requirements = build(folder), folder / "requirements.txt"
    write_requirements(requirements, uv)
    (folder / "constraints.txt").write_text(without_hashes(requirements.read_text()))
    shutil.copy(EXCLUDES, folder)
    homebrew.write(folder / "roundhouse.rb", uv, wheel)
    notes, is_final = notes_of(CHANGELOG.read_text(), version)
    (folder / "NOTES.md").write_text(notes + "\n" + _INSTALL.format(version=version))
    for python in given.python or pythons():
        print(check(uv, python, requirements, wheel), flush=True)
    (folder / SUMS).write_text(sums_of(sorted(folder.iterdir())))
    if given.key:
        sign(folder / SUMS, given.key)
    print((folder / SUMS).read_text(), *next_steps(version, folder, is_final, bool(given.key)), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except (ReleaseError, installed.InstallError, homebrew.FormulaError) as error:
        raise SystemExit(str(error)) from None
