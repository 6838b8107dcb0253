"""Rules for names: one class per name in a package, and no participles or persons as nouns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "broker", "worker", "deploy")
SHARED_NAMES = {"Body", "Message", "Tool"}
"""Class names that each dialect of the API may define."""
BANNED = {
    *("told", "said", "heard", "kept", "held", "looked", "known", "shown", "begun"),
    *("who", "whoever", "nobody", "somebody", "anybody", "everybody"),
}
"""Participles, and pronouns for persons, that must not name technical things."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@cache
def classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_class_names_are_unique_within_a_package(package: str) -> None:
    places = defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        for name in classes(path):
            if not name.startswith("_"):
                places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES}


@pytest.mark.parametrize("package", [*PACKAGES, "bench", "recipes"])
def test_class_and_module_names_have_no_banned_words(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    modules = [str(path.relative_to(ROOT)) for path in paths if BANNED & set(path.stem.split("_"))]
    found = [(str(path.relative_to(ROOT)), name) for path in paths for name in classes(path)]
    assert modules == []
    assert [each for each in found if BANNED & {word.lower() for word in WORD.findall(each[1])}] == []
