"""Draft models: speculation does not change answers, nor when the worker is killed; sparse prefill leaves out
tokens, and the same ones after a death."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client, wait_for, wait_until_flowing
from tests.models.fixtures import model_folder
from tests.models.mtp_models import HEADS
from tests.system import System, chat_body, eventually, running_system
from worker.pocket import MODEL_PATH

ANSWER_S_MAX = 300.0
TOKENS = 40
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2},
)
STREAMS = len(FIELDS)


def start(system: System, model: str) -> None:
    """Start a worker that speculates in every step, with the model as its own draft model or by its heads."""
    folder = str(model_folder(model))
    drafting = [] if model == HEADS else ["--draft-model", folder]
    system.start_ready_worker("--model", folder, *drafting, "--prefix-cache-disk", "0", module="tests.eager")


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    content = " ".join(f"{number}: the {word}" for word in ("fox", "dog", "house", "駅")[: 1 + number % 4])
    messages = [{"role": "user", "content": content * (1 + number)}]
    return {"messages": messages, "max_tokens": TOKENS, **FIELDS[number], **fields}


def answered(system: System, number: int, **fields: Any) -> str:
    reply = system.http.post("/v1/chat/completions", json=body_of(number, **fields), timeout=ANSWER_S_MAX)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def drafts_of(system: System) -> dict[str, Any]:
    """Return the draft statistics of the last worker, once it has drafted and is idle.

    The statistics of a busy worker are incomplete.
    """

    def told() -> dict[str, Any] | None:
        worker = system.http.get("/v1/status").json()["workers"][-1]
        drafts: dict[str, Any] = worker["drafts"] or {}
        at_rest = not worker["running"] and not worker["waiting"]
        return drafts if at_rest and "model" in drafts.get("sources", {}) else None

    return eventually(told, within_s=60, what="the worker has drafted") or {}


@pytest.mark.parametrize("model", ["hybrid", HEADS])
def test_answers_are_the_same_and_outlive_a_worker_that_drafts(model: str, tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        start(system, model)
        plain = [answered(system, number, speculation=False) for number in range(STREAMS)]
        with ThreadPoolExecutor(STREAMS) as pool:
            assert list(pool.map(lambda number: answered(system, number), range(STREAMS))) == plain
        tally = drafts_of(system)["sources"]["model"]
        assert tally["accepted"] > tally["rejected"] or model == HEADS
        # A resumed stream has to bring the draft model's caches up to date, or the states it drafts from.
        clients = [Client(system.url, body_of(number, stream=True)) for number in range(STREAMS)]
        for client in clients:
            client.start()
        wait_until_flowing(clients)
        system.workers[-1].kill()
        system.workers[-1].wait()
        start(system, model)
        for client in clients:
            client.join()
        assert [client.texts for client in clients] == [[text] for text in plain]
        assert drafts_of(system)["rejected"] > 0, "the next worker drafts too"


# --- the embedded model as its own draft model -------------------------------------------------------

FLAGS = ["--draft-model", str(MODEL_PATH), "--prefix-cache-disk", "0"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("pocket")) as system:
        system.start_ready_worker(*FLAGS, module="worker")
        yield system


WORDS = "the quick brown fox and the lazy dog and the red house and the quick brown fox and the lazy cat"


def test_answers_are_the_same_with_n_grams_and_predictions(system: System) -> None:
    requests: list[dict[str, Any]] = [
        chat_body(f"Repeat: {words}", max_tokens=32, **fields)
        for words, fields in (
            (WORDS, {}),
            ("駅 🦊 駅 🦊 駅 🦊 駅", {"temperature": 1.0, "seed": 7}),
            (WORDS, {"repetition_penalty": 1.1, "logprobs": True}),
        )
    ]

    def answer(body: dict[str, Any]) -> Any:
        reply = system.http.post("/v1/chat/completions", json=body, timeout=ANSWER_S_MAX)
        assert reply.status_code == 200, reply.text
        choice, usage = reply.json()["choices"][0], reply.json()["usage"]
        tokens = [token["token"] for token in (choice.get("logprobs") or {}).get("content", [])]
        return choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"], tokens

    plain = [answer(body | {"speculation": False}) for body in requests]
    likely = [
        body | {"prediction": {"type": "content", "content": text}}
        for body, (text, *_) in zip(requests, plain, strict=True)
    ]
    assert [answer(body) for body in likely] == plain
    with ThreadPoolExecutor(len(likely)) as pool:
        assert list(pool.map(answer, likely)) == plain


FILLER = "The river runs slowly past old houses and green fields where people walk with dogs. "
LITTLE = {"keep": 0.5, "above": 300}


def long_body(**fields: Any) -> dict[str, Any]:
    told = [FILLER * 8, "My name is Brynhild.", FILLER * 16, "What is my name?"]
    messages = [
        {"role": role, "content": content}
        for said in told
        for role, content in (("user", said), ("assistant", "So be it."))
    ][:-1]
    return {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def ask_long(system: System, **fields: Any) -> Any:
    return system.http.post("/v1/chat/completions", json=long_body(**fields), timeout=ANSWER_S_MAX)


def test_a_part_of_the_prompt_is_run_and_what_matters_is_in_it(system: System) -> None:
    whole, part = ask_long(system), ask_long(system, sparse_prefill=LITTLE)
    assert part.status_code == 200, part.text
    usage = part.json()["usage"]
    assert usage["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
    left_out = usage["prompt_tokens_details"]["sparse_tokens"]
    assert usage["prompt_tokens"] * 0.4 < left_out <= usage["prompt_tokens"] * 0.5
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert f"miss=request; sparse={left_out}" in part.headers["x-roundhouse-cache"]
    assert "Brynhild" in part.json()["choices"][0]["message"]["content"]
    assert "sparse_tokens" not in whole.json()["usage"]["prompt_tokens_details"]
    assert "sparse" not in whole.headers["x-roundhouse-cache"]


def test_whole_prompt_is_run_if_nothing_is_left_out_and_wrong_values_are_refused(system: System) -> None:
    texts = [
        ask_long(system, sparse_prefill=wish).json()["choices"][0]["message"]["content"]
        # True: as usual, for which the prompt is too short.
        for wish in (False, True, {"keep": 1.0, "above": 0})
    ]
    assert len(set(texts)) == 1
    reply = ask_long(system, sparse_prefill={"keep": 0})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("sparse_prefill")


def test_a_worker_that_dies_is_followed_by_one_that_leaves_out_the_same(system: System) -> None:
    """Must be the last test of the shared system, because it kills the worker."""
    fields = {"sparse_prefill": LITTLE, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    right = ask_long(system, **fields).json()["choices"][0]["message"]["content"]
    client = Client(system.url, long_body(**fields, stream=True))
    client.start()
    wait_until_flowing([client])
    system.workers[-1].kill()
    system.workers[-1].wait()
    successor = system.start_worker(*FLAGS, module="worker")
    wait_for([client], ANSWER_S_MAX)
    successor.stop()
    assert client.texts == [right]
