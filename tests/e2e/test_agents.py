"""Typical side requests of agents over HTTP do not evict the prefix of the main conversation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.models.fixtures import model_folder
from tests.system import System, running_system

MODELS = ("dense", "hybrid")
TURNS = 4
WAIT_S = 60.0

AGENT = "You are an agent that reads files and runs commands. " * 24
TITLES = "You write titles of at most six words, and nothing else. " * 12


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("agents")) as system:
        for name in MODELS:
            system.start_worker("--model", str(model_folder(name)), module="worker")
        system.wait_loaded(len(MODELS))
        yield system


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def billed(prompt: str, number: int) -> str:
    """Return a system prompt like Claude Code's, after a proxy that joins its blocks."""
    return f"x-anthropic-billing-header: cc_version=2.1.330.{number:03x}; cch={number:05x};\n{prompt}"


def ask(system: System, model: str, prompt: str, said: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [{"role": "system", "content": prompt}, *said]
    body = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    answer: httpx.Response = system.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("model", MODELS)
def test_a_title_asked_for_beside_each_turn_costs_neither_its_prefix(
    model: str, system: System, pool: ThreadPoolExecutor
) -> None:
    said: list[dict[str, Any]] = []
    before: tuple[int, int] | None = None
    for turn in range(TURNS):
        said.append({"role": "user", "content": f"Now read file {turn}, please."})
        title = {"role": "user", "content": f"Generate a title for conversation {turn}."}
        beside = pool.submit(ask, system, model, billed(TITLES, 1000 + turn), [title])
        main = ask(system, model, billed(AGENT, turn), said)
        other = beside.result(WAIT_S)
        if before is not None:
            # The whole previous turn is cached, and for titles their common prefix.
            assert cached(main) >= before[0] - 1
            assert cached(other) >= before[1] * 0.8
        before = (main["usage"]["prompt_tokens"], other["usage"]["prompt_tokens"])
        said.append({"role": "assistant", "content": main["choices"][0]["message"]["content"]})
