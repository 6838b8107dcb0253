"""Speculation does not change answers: greedy or sampled, alone or in a batch, whatever the
acceptance rate, nor when the worker is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client
from tests.models.fixtures import model_folder
from tests.models.make import make_model
from tests.models.mtp_models import HEADS
from tests.system import System, eventually, running_system

TOKENS = 60
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2},
)
STREAMS = len(FIELDS)


def start(system: System, model: str, draft: Path | None) -> None:
    guessing = ["--speculation", "auto"] if draft is None else ["--draft-model", str(draft)]
    flags = ["--model", str(model_folder(model)), *guessing, "--prefix-cache-disk", "0"]
    system.start_worker(*flags, module="tests.eager")
    system.wait_ready()


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    content = " ".join(f"{number}: the {word}" for word in ("fox", "dog", "house", "駅")[: 1 + number % 4])
    messages = [{"role": "user", "content": content * (1 + number)}]
    return {"messages": messages, "max_tokens": TOKENS, **FIELDS[number], **fields}


def answered(system: System, number: int, **fields: Any) -> str:
    reply = system.http.post("/v1/chat/completions", json=body_of(number, **fields))
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


@pytest.mark.parametrize("kind", ["itself", "another seed", "its own heads", "a trained drafter"])
def test_answers_are_the_same_and_outlive_a_worker_that_drafts(kind: str, tmp_path: Path) -> None:
    if kind == "another seed":
        model, draft = "dense", make_model("dense", tmp_path / "other", seed=1)
    else:
        model = HEADS if kind == "its own heads" else "hybrid"
        draft = {"itself": model_folder("hybrid"), "a trained drafter": model_folder("hybrid_dflash")}.get(
            kind
        )
    with running_system(tmp_path) as system:
        start(system, model, draft)
        plain = [answered(system, number, speculation=False) for number in range(STREAMS)]
        with ThreadPoolExecutor(STREAMS) as pool:
            assert list(pool.map(lambda number: answered(system, number), range(STREAMS))) == plain
        tally = drafts_of(system)["sources"]["model"]
        assert tally["accepted"] > tally["rejected"] or kind != "itself"
        assert tally["rejected"] > 0 or kind != "another seed"
        # A resumed stream has to bring the draft model's caches up to date, or the states it drafts from.
        if kind in ("itself", "its own heads"):
            go_on_after_a_kill(system, model, draft, plain)


def go_on_after_a_kill(system: System, model: str, draft: Path | None, plain: list[str]) -> None:
    clients = [Client(system.url, body_of(number, stream=True)) for number in range(STREAMS)]
    for client in clients:
        client.start()
    eventually(lambda: all(client.flowing for client in clients), within_s=60, what="all streams flow")
    system.workers[-1].kill()
    system.workers[-1].wait()
    start(system, model, draft)
    for client in clients:
        client.join()
    assert [client.texts for client in clients] == [[text] for text in plain]
    assert drafts_of(system)["rejected"] > 0, "the next worker drafts too"


WORDS = "the quick brown fox and the lazy dog and the red house and the quick brown fox and the lazy cat"


def test_answers_of_the_embedded_model_are_the_same_with_n_grams_and_predictions(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"Repeat: {words}"}], "max_tokens": 48, **fields}
        for words in (WORDS, "駅 🦊 駅 🦊 駅 🦊 駅")
        for fields in ({}, {"temperature": 1.0, "seed": 7}, {"repetition_penalty": 1.1}, {"logprobs": True})
    ]

    def answer(body: dict[str, Any]) -> Any:
        reply = system.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        choice, usage = reply.json()["choices"][0], reply.json()["usage"]
        tokens = [token["token"] for token in (choice.get("logprobs") or {}).get("content", [])]
        return choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"], tokens

    with running_system(tmp_path) as system:
        system.start_worker("--speculation", "auto", "--prefix-cache-ram", "0", module="worker")
        system.wait_ready()
        plain = [answer(body | {"speculation": False}) for body in requests]
        likely = [
            body | {"prediction": {"type": "content", "content": text}}
            for body, (text, *_) in zip(requests, plain, strict=True)
        ]
        assert [answer(body) for body in likely] == plain
        with ThreadPoolExecutor(len(likely)) as pool:
            assert list(pool.map(answer, likely * 2)) == plain * 2
        drafts = eventually(
            lambda: system.http.get("/v1/status").json()["workers"][0]["drafts"],
            within_s=60,
            what="the worker's heartbeat has arrived",
        )
        assert set(drafts) == {"accepted", "rejected", "sources"}
