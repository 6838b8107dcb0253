"""Worker deaths during long lists of texts do not change the embeddings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.fixtures import model_folder
from tests.system import System, eventually, running_system

NAME = "bert-embedder"
TEXTS = [f"signal {number} at the old station " * (1 + number % 7) for number in range(300)]
DEATHS = 1
TOLERANCE = 1e-5
WAIT_S = 90.0


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, ["--failover-timeout", "60"]) as system:
        start(system)
        system.wait_ready()
        yield system


def start(system: System) -> None:
    # Small steps, so that there is time for a kill within a list.
    system.start_worker("--model", str(model_folder(NAME)), "--prefill-tokens", "48", module="worker")


class Client(threading.Thread):
    """A client that requests the embeddings of a list, in a thread."""

    def __init__(self, system: System) -> None:
        super().__init__(daemon=True)
        self._system = system
        self.answer: dict[str, Any] = {}
        self.status = 0

    def run(self) -> None:
        answer = self._system.http.post("/v1/embeddings", json={"input": TEXTS}, timeout=WAIT_S)
        self.status, self.answer = answer.status_code, answer.json()

    @property
    def vectors(self) -> np.ndarray:
        self.join(WAIT_S)
        assert self.status == 200, self.answer
        return np.array([entry["embedding"] for entry in self.answer["data"]])


def prefilled(system: System) -> int:
    """Return the number of prefilled tokens of the only request."""
    workers = system.http.get("/v1/status").json()["workers"]
    return sum(row["prefilled"] for worker in workers for row in worker["rows"])


@pytest.mark.timeout(300)
def test_a_list_is_answered_whole_however_often_its_worker_dies(system: System) -> None:
    undisturbed = Client(system)
    undisturbed.start()
    expected = undisturbed.vectors
    client = Client(system)
    client.start()
    for _ in range(DEATHS):
        eventually(
            lambda: prefilled(system) > 0, within_s=WAIT_S, what="the worker has answered some of the list"
        )
        start(system)
        system.workers[-2].kill()
        system.workers[-2].wait()
        eventually(lambda: prefilled(system) == 0, within_s=WAIT_S, what="the death is noticed")
    assert np.abs(client.vectors - expected).max() < TOLERANCE
    assert client.answer["usage"] == undisturbed.answer["usage"]
    gateway = system.http.get("/v1/status").json()["gateway"]
    assert gateway["failover"]["resumed"] == DEATHS, gateway
