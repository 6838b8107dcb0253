"""Worker deaths during prompt logprobs do not change what clients receive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Client, wait_for
from tests.models.fixtures import model_folder
from tests.system import System, eventually, running_system

CLIENTS = 3
DEATHS = 1
TOLERANCE = 1e-4


class Scoring(Client):
    """A client that requests prompt logprobs and a few tokens."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        super().__init__(url, body)
        self._url = f"{url}/v1/completions"

    @property
    def events(self) -> int:
        """The number of events read so far."""
        return self.read.count(b"data: ")

    @property
    def told(self) -> dict[str, list[Any]]:
        """The only choice: its text, finish reason, and four lists of logprobs."""
        assert self.error is None, self.read[-300:]
        told: dict[str, list[Any]] = {"text": [""], "ends": []}
        for choice in (choice for document in self.documents for choice in document["choices"]):
            told["text"][0] += choice["text"]
            told["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, values in (choice["logprobs"] or {}).items():
                told.setdefault(name, []).extend(values)
        return told


@pytest.fixture(params=["dense", "hybrid"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, ["--failover-timeout", "60"]) as system:
        start(system, request.param)
        system.wait_ready()
        yield system


def start(system: System, name: str) -> None:
    system.start_worker("--model", str(model_folder(name)), "--prefill-tokens", "32", module="worker")


def bodies(name: str) -> list[dict[str, object]]:
    rng = random.Random(3)
    return [
        {
            "model": name,
            "prompt": [rng.randrange(1900) for _ in range(rng.randint(400, 600))],
            "echo": True,
            "logprobs": 2,
            "temperature": 0,
            "max_tokens": 0 if number % 3 == 2 else 20,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        for number in range(CLIENTS)
    ]


def ask_all(url: str, asked: Sequence[dict[str, object]]) -> list[Scoring]:
    clients = [Scoring(url, body) for body in asked]
    for client in clients:
        client.start()
    return clients


@pytest.mark.timeout(300)
def test_a_prompt_is_scored_once_however_often_its_worker_dies(system: System) -> None:
    name = str(system.http.get("/v1/models").json()["data"][0]["id"])
    asked = bodies(name)
    undisturbed = ask_all(system.url, asked)
    wait_for(undisturbed, 120)
    expected = [client.told for client in undisturbed]
    assert [len(told["tokens"]) for told in expected] == [
        len(body["prompt"]) + int(str(body["max_tokens"]))  # type: ignore[arg-type]
        for body in asked
    ]
    clients = ask_all(system.url, asked)
    streams = [client for client, body in zip(clients, asked, strict=True) if body["stream"]]
    for _ in range(DEATHS):
        # Prompts are prefilled one by one: the current one advances between deaths, the others wait.
        told = sum(stream.events for stream in streams)
        eventually(
            lambda told=told: sum(stream.events for stream in streams) > told + 6,  # type: ignore[misc]
            within_s=60,
            what="more prompt logprobs have arrived",
        )
        start(system, name)
        system.workers[-2].kill()
    wait_for(clients, 120)
    assert any(len(client.pauses) > 0 for client in streams)
    gateway = system.http.get("/v1/status").json()["gateway"]
    assert gateway["failover"]["resumed"] > 0, gateway
    for client, right in zip(clients, expected, strict=True):
        told = client.told
        for exact in ("text", "ends", "tokens", "text_offset"):
            assert told[exact] == right[exact]
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(right["token_logprobs"][1:], abs=TOLERANCE)
        for top, right_top in zip(told["top_logprobs"][1:], right["top_logprobs"][1:], strict=True):
            assert max(top.values()) == pytest.approx(max(right_top.values()), abs=TOLERANCE)
