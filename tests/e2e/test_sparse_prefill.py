"""Sparse prefill over HTTP: skipped tokens are reported, and the same after a worker death."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system import System, running_system
from worker.pocket import MODEL_PATH

FILLER = "The river runs slowly past old houses and green fields where people walk with dogs. "
LITTLE = {"keep": 0.5, "above": 300}


FLAGS = ["--draft-model", str(MODEL_PATH), "--prefix-cache-disk", "0"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("sparse")) as system:
        system.start_worker(*FLAGS, module="worker")
        system.wait_ready()
        yield system


def body_of(**fields: Any) -> dict[str, Any]:
    told = [FILLER * 8, "My name is Brynhild.", FILLER * 16, "What is my name?"]
    messages = [
        {"role": role, "content": content}
        for said in told
        for role, content in (("user", said), ("assistant", "So be it."))
    ][:-1]
    return {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def ask(system: System, **fields: Any) -> Any:
    return system.http.post("/v1/chat/completions", json=body_of(**fields))


def test_a_part_of_the_prompt_is_run_and_what_matters_is_in_it(system: System) -> None:
    whole, part = ask(system), ask(system, sparse_prefill=LITTLE)
    assert part.status_code == 200, part.text
    usage = part.json()["usage"]
    assert usage["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
    left_out = usage["prompt_tokens_details"]["sparse_tokens"]
    assert usage["prompt_tokens"] * 0.4 < left_out <= usage["prompt_tokens"] * 0.5
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert f"miss=sparse; sparse={left_out}" in part.headers["x-roundhouse-cache"]
    assert "Brynhild" in part.json()["choices"][0]["message"]["content"]
    assert "sparse_tokens" not in whole.json()["usage"]["prompt_tokens_details"]
    assert "sparse" not in whole.headers["x-roundhouse-cache"]


def test_the_other_dialects_take_it_too(system: System) -> None:
    messages = body_of()["messages"]
    answers = {
        "/v1/messages": {"messages": messages, "max_tokens": 8, "model": "pocket"},
        "/v1/responses": {"input": messages, "max_output_tokens": 8},
        "/v1/completions": {"prompt": FILLER * 20, "max_tokens": 8},
    }
    for path, body in answers.items():
        reply = system.http.post(path, json=body | {"sparse_prefill": LITTLE})
        assert reply.status_code == 200, reply.text
        assert "; sparse=" in reply.headers["x-roundhouse-cache"], path


def test_all_of_a_prompt_is_run_where_nothing_is_left_out_and_wrong_wishes_are_refused(
    system: System,
) -> None:
    texts = [
        ask(system, sparse_prefill=wish).json()["choices"][0]["message"]["content"]
        # True: as usual, for which the prompt is too short.
        for wish in (None, False, True, {"keep": 1.0, "above": 0}, {"keep": 0.2, "above": 100_000})
    ]
    assert len(set(texts)) == 1
    for wish in ({"keep": 0}, {"above": -1}, "yes"):
        reply = ask(system, sparse_prefill=wish)
        assert reply.status_code == 400, wish
        assert reply.json()["error"]["param"].startswith("sparse_prefill")


def test_a_worker_that_dies_is_followed_by_one_that_leaves_out_the_same(system: System) -> None:
    """Must be the last test of the shared system, because it kills the worker."""
    fields = {"sparse_prefill": LITTLE, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    worker = system.workers[-1]
    right = ask(system, **fields).json()
    with system.http.stream("POST", "/v1/chat/completions", json=body_of(**fields, stream=True)) as reply:
        lines = reply.iter_lines()
        text = "".join(_text(next(lines)) for _ in range(15))
        worker.kill()
        worker.wait()
        successor = system.start_worker(*FLAGS, module="worker")
        text += "".join(_text(line) for line in lines)
    successor.stop()
    assert text == right["choices"][0]["message"]["content"]


def _text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return str(choices[0]["delta"].get("content") or "") if choices else ""
