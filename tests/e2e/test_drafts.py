"""Speculation does not change answers: greedy or sampled, streamed or not, alone or in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.system import System, eventually, running_system

WORDS = "the quick brown fox and the lazy dog and the red house and the quick brown fox and the lazy cat"
REQUESTS: tuple[dict[str, Any], ...] = tuple(
    {"messages": [{"role": "user", "content": f"Repeat: {words}"}], "max_tokens": 48, **fields}
    for words in (WORDS, f"{WORDS} {WORDS}", "駅 🦊 駅 🦊 駅 🦊 駅")
    for fields in ({}, {"temperature": 1.0, "seed": 7}, {"repetition_penalty": 1.1}, {"logprobs": True})
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("drafts")) as system:
        system.start_worker("--speculation", "auto", "--prefix-cache-ram", "0", module="worker")
        system.wait_ready()
        yield system


def answered(system: System, body: dict[str, Any]) -> Any:
    reply = system.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    tokens = [token["token"] for token in (choice.get("logprobs") or {}).get("content", [])]
    return choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"], tokens


def test_answers_are_the_same_with_drafts(system: System) -> None:
    plain = [answered(system, body | {"speculation": False}) for body in REQUESTS]
    likely = [
        body | {"prediction": {"type": "content", "content": text}}
        for body, (text, *_) in zip(REQUESTS, plain, strict=True)
    ]
    assert [answered(system, body) for body in likely] == plain
    with ThreadPoolExecutor(len(likely)) as pool:
        assert list(pool.map(lambda body: answered(system, body), likely * 2)) == plain * 2


def test_status_tells_what_came_of_them(system: System) -> None:
    def told() -> dict[str, int] | None:
        (worker,) = system.http.get("/v1/status").json()["workers"]
        drafts: dict[str, int] | None = worker["drafts"]
        return drafts

    drafts = eventually(told, within_s=10, what="the worker's heartbeat has arrived")
    assert set(drafts or ()) == {"accepted", "rejected", "sources"}
