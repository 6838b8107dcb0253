"""A draft model does not change answers, whatever its acceptance rate, nor when the worker is killed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client
from tests.models.fixtures import model_folder
from tests.models.make import make_model
from tests.models.mtp_models import HEADS
from tests.system import System, eventually, running_system

TOKENS = 120
STREAMS = 4
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
    """Return the draft statistics of the last worker, once it has drafted and is idle.

    The statistics of a busy worker are incomplete.
    """

    def told() -> dict[str, Any] | None:
        worker = system.http.get("/v1/status").json()["workers"][-1]
        drafts: dict[str, Any] = worker["drafts"] or {}
        at_rest = not worker["running"] and not worker["waiting"]
        return drafts if at_rest and "model" in drafts.get("sources", {}) else None

    return eventually(told, within_s=20, what="the worker has drafted") or {}


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
    assert drafts_of(system)["rejected"] > 0, "the next worker drafts too"


def test_rejected_drafts_do_not_change_the_output(tmp_path: Path) -> None:
    other = make_model("dense", tmp_path / "other", seed=1)
    with running_system(tmp_path) as system:
        start(system, "dense", other)
        plain = [answered(system, number, speculation=False) for number in range(4)]
        assert [answered(system, number) for number in range(4)] == plain
        assert drafts_of(system)["sources"]["model"]["rejected"] > 0
