"""Docstrings name what exists: words in backticks are names of the code, of its documents, or of others."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted(
    path for name in ("protocol", "broker", "worker", "deploy") for path in (ROOT / name).rglob("*.py")
)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
NAME = re.compile(r"(?<!`)`([A-Za-z_][A-Za-z0-9_.]*)(?:\(\))?`(?!`)")
EXPLAINED = re.compile(r"(?:^|[.;:] |\n\s*)((?:`[a-z_][a-z0-9_]*`(?:, | and )?)+): ")
"""Names that a docstring explains, each followed by a colon."""
OF_OTHERS = {
    *("sun_path", "maybe_quantize_kv_cache", "make_text_state_machine", "DecodeStream", "decoders"),
    *("DoRALinear", "LoRALinear", "LoRASwitchLinear"),
    *("encode_fim", "encode_infilling", "infilling_prompt_tokens", "mistral_common"),
    *("adaptive", "bash_20250124", "comparison_response_id", "defer_loading", "prompt_n"),
    "ROUNDHOUSE_MAX_WAITING",
}
"""Names of libraries and of clients' requests that our code does not contain, or composes."""
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _scopes(tree: ast.Module) -> Iterator[Scope]:
    return (node for node in ast.walk(tree) if isinstance(node, Scope))


def _docstrings(scope: Scope) -> list[ast.Constant]:
    """Return a scope's own docstring, and those of its variables and fields."""
    texts = [each.value for each in scope.body if isinstance(each, ast.Expr)]
    return [text for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield all identifiers of a module, and the words of its strings."""
    documents = {id(text) for scope in _scopes(tree) for text in _docstrings(scope)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias():
                yield from f"{node.name}.{node.asname or ''}".split(".")
            case ast.ImportFrom(module=str(module)):
                yield from module.split(".")
            case ast.Constant(value=str(text)) if id(node) not in documents:
                yield from re.findall(r"\w+", text)
            case _:
                pass


@pytest.fixture(scope="module")
def known() -> set[str]:
    files = {part for path in PATHS for part in path.relative_to(ROOT).with_suffix("").parts}
    names = {name for tree in TREES.values() for name in _names(tree)}
    return {*dir(builtins), *keyword.kwlist, *files, *names, *OF_OTHERS}


def test_names_in_docstrings_exist(known: set[str]) -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {name}"
        for path, tree in TREES.items()
        for scope in _scopes(tree)
        for text in _docstrings(scope)
        for name in NAME.findall(str(text.value))
        if not known.issuperset(filter(None, name.split(".")))
    ]
    assert unknown == []


def test_what_a_docstring_explains_is_a_parameter_or_a_field() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{scope.lineno}: {scope.name} explains {name}"
        for path, tree in TREES.items()
        for scope in _scopes(tree)
        if not isinstance(scope, ast.Module)
        for names in EXPLAINED.findall(ast.get_docstring(scope) or "")
        for name in re.findall(r"`(\w+)`", names)
        if name not in _own(scope)
    ]
    assert unknown == []


def _own(scope: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the parameters of a function, or whatever a class names."""
    if isinstance(scope, ast.ClassDef):
        return {*_names(ast.Module(body=[scope], type_ignores=[]))}
    return {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
