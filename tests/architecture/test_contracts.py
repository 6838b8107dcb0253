"""Import contracts of the linter: each forbidden import, planted in a copy of the code, must be refused.

A folder's name says what may happen in it. The imports forbidden to a subpackage are listed in
`pyproject.toml` under `[tool.importlinter]`; `docs/architecture.md` gives the reasons.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "broker", "worker", "deploy")
WAIT_S = 100

CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS: list[dict[str, Any]] = CONFIGURATION["tool"]["importlinter"]["contracts"]

Refused = tuple[str, str]
"""Importing module and imported module."""


def siblings(layer: str) -> list[str]:
    """Return the modules of one layer. Separated by `|` they may not import each other, by `:` they may."""
    return [name.strip(" ()") for name in re.split(r"[|:]", layer)]


def forbidden(contract: dict[str, Any]) -> Iterator[Refused]:
    """Yield each import that a contract forbids."""
    if contract["type"] == "forbidden":
        for source in contract["source_modules"]:
            yield from ((source, name) for name in contract["forbidden_modules"])
        return
    assert contract["type"] == "layers", "this test supports only contracts of type forbidden and layers"
    for container in contract["containers"] or [""]:
        layers = [
            [f"{container}.{name}".strip(".") for name in siblings(layer)] for layer in contract["layers"]
        ]
        for high, low in combinations(layers, 2):
            yield from ((source, name) for source in low for name in high)
        for layer, names in zip(contract["layers"], layers, strict=True):
            if "|" in layer:
                yield from ((a, b) for a in names for b in names if a != b)


def plant(tree: Path, pairs: set[Refused]) -> None:
    for source, name in pairs:
        place = tree / source.replace(".", "/")
        module = place / "planted.py" if place.is_dir() else place.with_suffix(".py")
        with module.open("a", encoding="utf-8") as file:
            file.write(f"\nimport {name}\n")


def lint(tree: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy of the code, to plant imports in."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    return tmp_path


def test_every_contract_is_kept() -> None:
    told = lint(ROOT)
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in told, told


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_each_import_that_a_contract_forbids_is_refused(contract: dict[str, Any], tree: Path) -> None:
    pairs = set(forbidden(contract))
    assert pairs, "the contract forbids nothing"
    plant(tree, pairs)
    told = lint(tree)
    assert f"{contract['name']} BROKEN" in " ".join(told.split())
    refused = set(re.findall(r"^([\w.]+) is not allowed to import ([\w.]+):", told, re.MULTILINE))
    assert pairs <= refused, pairs - refused


def test_a_module_beside_the_subpackages_is_refused(tree: Path) -> None:
    for package in ("broker", "worker", "deploy"):
        (tree / package / "shed.py").write_text("")
    told = lint(tree)
    for package in ("broker", "worker", "deploy"):
        assert f"{package}.shed" in told, told
