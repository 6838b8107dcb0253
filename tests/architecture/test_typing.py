"""Type checking of every module that implements a protocol of the worker, such as a test's engine.

A changed protocol is then an error of `make lint` in each of these modules. Otherwise it would be a
failure of a program that the tests do not run.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
PROTOCOLS = ("engine", "drafts", "guides", "texts")
"""Modules of `worker.contract` whose protocols tests implement."""
IMPLEMENTING = ("tests", "bench")

Methods = Mapping[str, list[str]]
"""Positional parameters of each method, by its name."""


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node


def methods(node: ast.ClassDef) -> Methods:
    found = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return {each.name: [argument.arg for argument in each.args.args] for each in found}


def protocols() -> list[Methods]:
    found = [each for name in PROTOCOLS for each in classes(ROOT / "worker" / "contract" / f"{name}.py")]
    return [methods(each) for each in found if any("Protocol" in ast.unparse(base) for base in each.bases)]


def implements(own: Methods, protocol: Methods) -> bool:
    """Return whether a method of a class shares its name and first parameter with one of `protocol`."""
    shared = own.keys() & protocol.keys()
    return any(len(own[name]) > 1 and own[name][:2] == protocol[name][:2] for name in shared)


def is_checked(path: str) -> bool:
    """Return whether mypy checks the file by itself, and not only where another file imports it."""
    module = path.removesuffix(".py").replace("/", ".")
    return module in MYPY["modules"] or not any(re.search(pattern, path) for pattern in MYPY["exclude"])


def implementing() -> list[str]:
    known = protocols()
    files = [path for package in IMPLEMENTING for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        path.relative_to(ROOT).as_posix()
        for path in files
        if any(implements(own, protocol) for own in map(methods, classes(path)) for protocol in known)
    ]


def test_modules_that_implement_a_protocol_of_the_worker_are_type_checked() -> None:
    assert MYPY["strict"]
    assert set(IMPLEMENTING) <= set(MYPY["packages"])
    found = implementing()
    assert {"tests/conformance/capable.py", "tests/worker/engines.py", "bench/schemas.py"} <= set(found)
    unchecked = [path for path in found if not is_checked(path)]
    assert not unchecked, f"add these to `modules` of [tool.mypy] in pyproject.toml: {unchecked}"


def test_modules_that_are_named_to_the_type_checker_exist() -> None:
    for module in MYPY["modules"]:
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), module
