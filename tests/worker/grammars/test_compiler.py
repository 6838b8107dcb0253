"""Compilation: each grammar once, and within limits for any input."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.types import StructuredOutput
from tests.system import eventually
from tests.worker.grammars.sampling import small, wide
from worker.grammars import compiler as compilers
from worker.grammars.compiler import (
    ABANDONED_MAX,
    KEPT_MAX,
    RUNNING_MAX,
    Compiler,
    CompilerBusyError,
    GrammarError,
    GrammarTimeoutError,
)
from worker.grammars.response_formats import ResponseFormatError, grammar_of

INTEGER = {"type": "integer"}


def schema_of(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=json.dumps(schema))


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=pattern)


SOME = grammar_of(regex("[a-z]+"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the grammars passed to llguidance."""
    asked: list[str] = []
    real = compilers._compiled

    def counting(lexicon: Any, grammar: str) -> Any:
        asked.append(grammar)
        return real(lexicon, grammar)

    monkeypatch.setattr(compilers, "_compiled", counting)
    return asked


def test_a_grammar_is_compiled_once_even_for_two_at_once(compiled: list[str]) -> None:
    compiler = Compiler(small().lexicon)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiler.compile, [SOME] * 8))
    assert compiled == [SOME]
    assert all(one is found[0] for one in found)


def test_least_recently_used_grammar_is_evicted(compiled: list[str]) -> None:
    compiler = Compiler(small().lexicon)
    grammars = [grammar_of(regex(f"x{number}")) for number in range(KEPT_MAX + 1)]
    for grammar in [*grammars[:-1], grammars[0], grammars[-1], grammars[0], grammars[1]]:
        compiler.compile(grammar)
    assert compiled == [*grammars, grammars[1]]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Block compilation until it is released."""
    gate = threading.Event()

    def waiting(_lexicon: Any, _grammar: str) -> str:
        assert gate.wait(60)
        return "let go"

    monkeypatch.setattr(compilers, "_compiled", waiting)
    yield gate
    gate.set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "compile"}


def test_what_takes_too_long_leaves_room_for_others_and_threads_are_limited(stuck: threading.Event) -> None:
    compiler = Compiler(small().lexicon)
    before = threads()  # of earlier tests: they may end at any time
    for number in range(RUNNING_MAX + ABANDONED_MAX):
        with pytest.raises(GrammarTimeoutError, match="longer than"):
            compiler.compile(f"{SOME}// {number}", 0.01)
    with pytest.raises(CompilerBusyError):
        compiler.compile(SOME, 0.01)
    assert len(threads() - before) == RUNNING_MAX + ABANDONED_MAX
    stuck.set()
    with pytest.raises(GrammarError, match="let go"):
        compiler.compile(SOME, 60)


def test_who_has_waited_for_others_is_not_refused_for_taking_too_long(stuck: threading.Event) -> None:
    compiler = Compiler(small().lexicon)
    with ThreadPoolExecutor(RUNNING_MAX) as pool:
        firsts = [pool.submit(compiler.compile, f"{SOME}// {number}", 0.5) for number in range(RUNNING_MAX)]
        eventually(lambda: len(compiler._kept) == RUNNING_MAX, within_s=5)
        with pytest.raises(CompilerBusyError):  # it begins when those are abandoned
            compiler.compile(SOME, 0.8)
        for first in firsts:
            with pytest.raises(GrammarTimeoutError):
                first.result()


def test_whatever_goes_wrong_is_the_requests_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_lexicon: Any, _grammar: str) -> str:
        raise BaseException("a panic")

    monkeypatch.setattr(compilers, "_compiled", failing)
    with pytest.raises(GrammarError, match="cannot be compiled"):
        Compiler(small().lexicon).compile(SOME)


EITHER = [{"anyOf": [{"required": [f"{side}{place}"]} for side in "ab"]} for place in range(20)]
EXPLODING: dict[str, Callable[[], StructuredOutput]] = {
    "a product of alternatives": lambda: schema_of({"allOf": EITHER, "type": "object"}),
    "a megabyte": lambda: schema_of({"properties": {f"property_{n}": INTEGER for n in range(40_000)}}),
    "division by a large number": lambda: schema_of({"type": "integer", "multipleOf": 999_983}),
    "many choices": lambda: StructuredOutput(kind="choice", text=json.dumps([f"{n}" for n in range(10_001)])),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_pathological_grammar_is_refused(name: str) -> None:
    with pytest.raises((ResponseFormatError, GrammarError)):
        wide().compiler.compile(grammar_of(EXPLODING[name]()))


LARGE: dict[str, StructuredOutput] = {
    "a long list": schema_of({"type": "array", "items": INTEGER, "maxItems": 10**6}),
    "a long chain of rules": StructuredOutput(
        kind="lark", text="start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(5000)) + 'r5000: "b"'
    ),
    "recursion": schema_of({"type": "object", "properties": {"a": {"$ref": "#"}}}),
    "exponential states": regex("(.|\n)*a(.|\n){20}"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_grammar_is_compiled(name: str) -> None:
    wide().compiler.compile(grammar_of(LARGE[name]), 60.0)  # its limit of time is another test's
