"""Worker deaths during prompt logprobs do not change what clients receive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client, wait_for
from tests.models.fixtures import model_folder
from tests.system import System, eventually, running_system

MODEL = "hybrid"
CLIENTS = 3
TOLERANCE = 1e-4


def told(client: Client) -> dict[str, list[Any]]:
    """Return of the only choice: its text, finish reason, and four lists of logprobs."""
    assert client.error is None, client.read[-300:]
    told: dict[str, list[Any]] = {"text": [""], "ends": []}
    for choice in (choice for document in client.documents for choice in document["choices"]):
        told["text"][0] += choice["text"]
        told["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        for name, values in (choice["logprobs"] or {}).items():
            told.setdefault(name, []).extend(values)
    return told


def start(system: System) -> None:
    system.start_worker("--model", str(model_folder(MODEL)), "--prefill-tokens", "32", module="worker")


def bodies() -> list[dict[str, Any]]:
    rng = random.Random(3)
    common = {"model": MODEL, "echo": True, "logprobs": 2, "temperature": 0, "ignore_eos": True}
    return [
        common
        | {
            "prompt": [rng.randrange(1900) for _ in range(rng.randint(400, 600))],
            "max_tokens": 0 if number % 3 == 2 else 20,
            "stream": number % 2 == 0,
        }
        for number in range(CLIENTS)
    ]


def ask_all(url: str, asked: Sequence[dict[str, Any]]) -> list[Client]:
    clients = [Client(url, body, "/v1/completions") for body in asked]
    for client in clients:
        client.start()
    return clients


@pytest.mark.timeout(300)
def test_a_prompt_is_scored_once_when_its_worker_dies(tmp_path: Path) -> None:
    asked = bodies()
    with running_system(tmp_path, ["--failover-timeout", "60"]) as system:
        start(system)
        system.wait_ready()
        undisturbed = ask_all(system.url, asked)
        wait_for(undisturbed, 120)
        expected = [*map(told, undisturbed)]
        assert [len(each["tokens"]) for each in expected] == [
            len(body["prompt"]) + body["max_tokens"] for body in asked
        ]
        clients = ask_all(system.url, asked)
        streams = [client for client, body in zip(clients, asked, strict=True) if body["stream"]]
        eventually(
            lambda: sum(stream.read.count(b"data: ") for stream in streams) > 6,
            within_s=60,
            what="prompt logprobs have arrived",
        )
        start(system)
        system.workers[0].kill()
        wait_for(clients, 120)
        gateway = system.http.get("/v1/status").json()["gateway"]
        assert gateway["failover"]["resumed"] > 0, gateway
    for found, right in zip(map(told, clients), expected, strict=True):
        for exact in ("text", "ends", "tokens", "text_offset"):
            assert found[exact] == right[exact]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(right["token_logprobs"][1:], abs=TOLERANCE)
        for top, right_top in zip(found["top_logprobs"][1:], right["top_logprobs"][1:], strict=True):
            assert max(top.values()) == pytest.approx(max(right_top.values()), abs=TOLERANCE)
