"""With a draft model: the same answers, whether it guesses right or wrong, and when its worker is killed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client
from tests.models.fixtures import model_folder
from tests.models.heads import HEADS
from tests.models.make import make_model
from tests.system import System, eventually, running_system

TOKENS = 120
STREAMS = 6
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2},
)


def start(system: System, model: str, draft: Path) -> None:
    by_itself = draft == model_folder(HEADS)
    guessing = ["--speculation", "auto"] if by_itself else ["--draft-model", str(draft)]
    flags = ["--model", str(model_folder(model)), *guessing, "--prefix-cache-disk", "0"]
    system.start_worker(*flags, module="tests.eager")
    system.wait_ready()


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    content = " ".join(f"{number}: the {word}" for word in ("fox", "dog", "house", "駅")[: 1 + number % 4])
    messages = [{"role": "user", "content": content * (1 + number)}]
    return {"messages": messages, "max_tokens": TOKENS, **FIELDS[number % len(FIELDS)], **fields}


def answered(system: System, number: int, **fields: Any) -> str:
    reply = system.http.post("/v1/chat/completions", json=body_of(number, **fields))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def drafts_of(system: System) -> dict[str, Any]:
    """What the last worker says of its drafts, once it has made some."""

    def told() -> dict[str, Any] | None:
        workers = system.http.get("/v1/status").json()["workers"]
        drafts: dict[str, Any] = workers[-1]["drafts"] or {}
        return drafts if "model" in drafts.get("sources", {}) else None

    return eventually(told, within_s=20, what="the worker has tried guesses") or {}


@pytest.mark.parametrize(
    ("model", "draft"),
    [("dense", "dense"), ("hybrid", "hybrid"), (HEADS, HEADS), ("hybrid", "hybrid_dflash")],
)
def test_answers_are_the_same_and_outlive_a_worker_that_drafts(
    model: str, draft: str, tmp_path: Path
) -> None:
    with running_system(tmp_path) as system:
        start(system, model, model_folder(draft))
        plain = [answered(system, number, speculation=False) for number in range(STREAMS)]
        with ThreadPoolExecutor(STREAMS) as pool:
            assert list(pool.map(lambda number: answered(system, number), range(STREAMS))) == plain
        tally = drafts_of(system)["sources"]["model"]
        assert tally["accepted"] > tally["rejected"] or draft != model or model == HEADS
        go_on_after_a_kill(system, model, draft, plain)


def go_on_after_a_kill(system: System, model: str, draft: str, plain: Sequence[str]) -> None:
    clients = [Client(system.url, body_of(number, stream=True)) for number in range(STREAMS)]
    for client in clients:
        client.start()
    eventually(lambda: all(client.flowing for client in clients), within_s=60, what="all streams flow")
    system.workers[-1].kill()
    system.workers[-1].wait()
    start(system, model, model_folder(draft))
    for client in clients:
        client.join()
    assert [client.texts for client in clients] == [[text] for text in plain]
    assert drafts_of(system)["rejected"] > 0, "the next one drafts, too"


def test_one_that_guesses_wrong_changes_nothing(tmp_path: Path) -> None:
    other = make_model("dense", tmp_path / "other", seed=1)
    with running_system(tmp_path) as system:
        start(system, "dense", other)
        plain = [answered(system, number, speculation=False) for number in range(4)]
        assert [answered(system, number) for number in range(4)] == plain
        assert drafts_of(system)["sources"]["model"]["rejected"] > 0
