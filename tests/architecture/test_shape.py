"""Style rules that a test can check: lengths, docstrings, names, broad handlers, sleeps, private paths."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "broker", "worker", "deploy", "bench")

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BY_NAME = {str(path.relative_to(ROOT)): path for path in SOURCES}

# Paths that would reveal a machine: a home, a checkout, a build folder.
PRIVATE_PATH = re.compile(r"(?<![\w.~:/*-])/(?:home|Users|root|work|builds|workspace)/")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")

# The only modules that may catch everything: loops of a thread or process, and boundaries of a request.
BOUNDARIES = {
    "broker/answers/answer.py",
    "broker/app.py",
    "broker/requests/batch_lines.py",
    "broker/transport/router.py",
    "protocol/common/logs.py",
    "worker/core/adapter_changes.py",
    "worker/core/speculation.py",
    "worker/core/embedding_core.py",
    "worker/core/failures.py",
    "worker/core/engine_core.py",
    "worker/grammars/compiler.py",
    "worker/input/pool.py",
    "worker/core/prefix/store.py",
    "worker/gateway/model_thread.py",
    "worker/load/load.py",
    "worker/load/sharded/loader.py",
    "worker/ranks/follower.py",
    "worker/ranks/leader.py",
    "worker/runner/sampling/grammar_masks.py",
}
# Exempt, because a library raises nothing narrower.
EXCUSED = {
    "worker/input/media/images.py",
    "worker/load/capabilities.py",
    "worker/load/text.py",
    "worker/load/vlm_text.py",
}

SHARED_NAMES = {"Body", "Message", "Tool"}
"""Class names that each dialect of the API may define."""
BANNED = {
    *("told", "said", "heard", "kept", "held", "looked", "known", "shown", "begun"),
    *("who", "whoever", "nobody", "somebody", "anybody", "everybody"),
}
"""Participles, and pronouns for persons, that must not name technical things."""
CODE_WORDS = {"told", "said", "heard", "foreman", "doorman", "caffeine"}
"""Words of earlier versions that must not name variables, parameters and fields either."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

RUNS = {"run", "Popen", "check_output"}
MAY_SLEEP = {"worker/load/memory.py", "protocol/lifeline.py", "bench/processes.py"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes, whose walk takes as long as to parse them."""
    return list(ast.walk(tree))


@cache
def classes(path: Path) -> list[str]:
    return [node.name for node in nodes(parsed(path)) if isinstance(node, ast.ClassDef)]


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def catches_everything(tree: ast.Module) -> bool:
    handlers = [node for node in nodes(tree) if isinstance(node, ast.ExceptHandler)]
    named = [each for node in handlers for each in getattr(node.type, "elts", [node.type])]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException"))
        for name in named
    )


def sleeps(tree: ast.Module) -> bool:
    named = [node for node in nodes(tree) if isinstance(node, ast.Attribute) and node.attr == "sleep"]
    return any(isinstance(node.value, ast.Name) and node.value.id == "time" for node in named)


def reads_by_locale(tree: ast.Module) -> list[int]:
    """Return the lines with calls that read or write text in the locale's encoding, or by Unicode's lines."""
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _is_by_locale(call, {each.arg for each in call.keywords})]


def _is_by_locale(call: ast.Call, given: set[str | None]) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("open", "fdopen") and "encoding" not in given:
        values = [each.value for each in call.args if isinstance(each, ast.Constant)]
        return any(isinstance(value, str) and re.fullmatch(r"[rwax]t?\+?", value) for value in values)
    if name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute):
        return "encoding" not in given
    return name in ("iter_lines", "aiter_lines") or (
        bool({"text", "universal_newlines"} & given) and name in RUNS
    )


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    found = {name: parsed(path) for name, path in BY_NAME.items()}
    assert {name.split("/")[0] for name in found} == set(PACKAGES)
    assert len(TESTS) > 20
    return found


def test_modules_have_the_shape_of_the_house(trees: dict[str, ast.Module]) -> None:
    for name, tree in trees.items():
        text = BY_NAME[name].read_text(encoding="utf-8")
        assert text.count("\n") <= FILE_LINES_MAX, name
        assert ast.get_docstring(tree), f"{name} has no docstring"
        for function in functions(tree):
            assert (function.end_lineno or 0) - function.lineno < FUNCTION_LINES_MAX, (name, function.name)
        assert not UNFINISHED.search(text), f"{name}: unfinished work belongs in an issue"


def test_everything_is_caught_at_boundaries_only(trees: dict[str, ast.Module]) -> None:
    assert {name for name, tree in trees.items() if catches_everything(tree)} == BOUNDARIES | EXCUSED


def test_modules_do_not_call_time_sleep(trees: dict[str, ast.Module]) -> None:
    assert {name for name, tree in trees.items() if sleeps(tree)} == MAY_SLEEP


def test_text_is_utf8_in_every_locale(trees: dict[str, ast.Module]) -> None:
    found = {name: reads_by_locale(tree) for name, tree in trees.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "bench"])
def test_public_class_names_are_unique_within_a_package(package: str) -> None:
    places = defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        for name in classes(path):
            if not name.startswith("_"):
                places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES}


@pytest.mark.parametrize("package", [*PACKAGES, "recipes"])
def test_class_and_module_names_have_no_banned_words(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    modules = [str(path.relative_to(ROOT)) for path in paths if BANNED & set(path.stem.split("_"))]
    found = [(str(path.relative_to(ROOT)), name) for path in paths for name in classes(path)]
    assert modules == []
    assert [each for each in found if BANNED & {word.lower() for word in WORD.findall(each[1])}] == []


def test_the_gateways_names_have_no_code_words(trees: dict[str, ast.Module]) -> None:
    packages = ("broker/", "deploy/", "protocol/")
    named = {
        (name, str(getattr(node, field, "")))
        for name, tree in trees.items()
        for node in nodes(tree)
        for field in ("id", "arg", "attr", "name")
        if name.startswith(packages)
    }
    assert {each for each in named if CODE_WORDS & set(each[1].split("_"))} == set()


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    documents = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".lock", "")]
    documents = [path for path in documents if path.name != ".git"]  # a file, in a second work tree of git
    for path in [*SOURCES, *TESTS, *(path for path in documents if path.is_file())]:
        text = path.read_text(encoding="utf-8")
        found = PRIVATE_PATH.search(text)
        assert found is None, f"{path.relative_to(ROOT)}: {found}"
        assert len(ROOT.parts) < 3 or str(ROOT) not in text, path.relative_to(ROOT)


def test_the_lock_pins_and_hashes_everything_and_names_no_registry() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index-url" not in text
    requirements = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    assert len(requirements) > 20
    for block in requirements:
        assert re.match(r"[A-Za-z0-9._-]+(\[[\w,-]+\])?==\S+", block), block.splitlines()[0]
        assert "--hash=sha256:" in block, block.splitlines()[0]
