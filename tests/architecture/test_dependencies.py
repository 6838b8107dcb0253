"""What the wheel depends on: declared, bounded, and locked at versions that the bounds allow."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.homebrew import EXCLUDES, LOCK, locked_hashes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "broker", "worker", "deploy")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
]
TOUCHED = {"mlx", "mlx-lm", "mlx-vlm", "starlette", "transformers", "typer", "uvicorn"}
"""Those whose classes are extended, or whose functions are replaced or private."""
LOCKED = [name.split("==") for name in locked_hashes(LOCK.read_text())]
EXCLUDED = set(re.findall(r"^[a-z].*", EXCLUDES.read_text(), re.MULTILINE))


@pytest.mark.parametrize("each", DECLARED, ids=str)
def test_a_dependency_is_locked_and_bounded_by_the_next_version_that_may_break_it(each: Requirement) -> None:
    versions = [Version(version) for name, version in LOCKED if name == canonicalize_name(each.name)]
    assert versions
    assert all(each.specifier.contains(version) for version in versions)
    newest = max(versions)
    following = (newest.major, newest.minor + 1) if each.name in TOUCHED else (newest.major + 1,)
    bounds = [Version(some.version) for some in each.specifier if some.operator == "<"]
    assert [bound.release for bound in bounds] == [following]


def test_what_the_packages_import_is_declared() -> None:
    distributions = packages_distributions()
    declared = {canonicalize_name(each.name) for each in DECLARED}
    ours = {*PACKAGES, *sys.stdlib_module_names, "backports", "compression"}
    for name in {name for package in PACKAGES for name in _imports(package)} - ours:
        assert {canonicalize_name(each) for each in distributions[name]} & declared, name


def test_nothing_that_is_excluded_is_locked_or_imported() -> None:
    assert not EXCLUDED & {name for name, _ in LOCKED}
    folders = (*PACKAGES, "bench", "recipes", "tests")
    assert not EXCLUDED & {name for folder in folders for name in _imports(folder)}


def _imports(folder: str) -> set[str]:
    """Return the top modules that the files of a folder import."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found
