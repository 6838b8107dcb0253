"""Worker deaths during long lists of texts do not change the embeddings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.fixtures import model_folder
from tests.system import System, eventually, running_system

TEXTS = [f"signal {number} at the old station " * (1 + number % 7) for number in range(300)]
TOLERANCE = 1e-5
WAIT_S = 90.0


def start(system: System) -> None:
    # Small steps, so that there is time for a kill within a list.
    folder = model_folder("bert-embedder")
    system.start_worker("--model", str(folder), "--prefill-tokens", "48", module="worker")


def ask(system: System) -> dict[str, Any]:
    answer = system.http.post("/v1/embeddings", json={"input": TEXTS}, timeout=WAIT_S).raise_for_status()
    document: dict[str, Any] = answer.json()
    return document


def vectors(document: dict[str, Any]) -> np.ndarray:
    return np.array([entry["embedding"] for entry in document["data"]])


def prefilled(system: System) -> int:
    """Return the number of prefilled tokens of the only request."""
    workers = system.http.get("/v1/status").json()["workers"]
    return sum(row["prefilled"] for worker in workers for row in worker["rows"])


@pytest.mark.timeout(300)
def test_a_list_is_answered_whole_when_its_worker_dies(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--failover-timeout", "60"]) as system, ThreadPoolExecutor(1) as pool:
        start(system)
        system.wait_ready()
        undisturbed = ask(system)
        answer = pool.submit(ask, system)
        eventually(lambda: prefilled(system) > 0, within_s=WAIT_S, what="some of the list is answered")
        start(system)
        system.workers[0].kill()
        document = answer.result(WAIT_S)
        assert np.abs(vectors(document) - vectors(undisturbed)).max() < TOLERANCE
        assert document["usage"] == undisturbed["usage"]
        gateway = system.http.get("/v1/status").json()["gateway"]
        assert gateway["failover"]["resumed"] == 1, gateway
