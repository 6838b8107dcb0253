"""Malformed requests: a short run of `python -m tests.faults.bodies`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import bodies
from tests.system import eventually, running_system

COUNT = 400


def test_whatever_is_sent_the_answer_is_orderly_and_nobody_else_notices(tmp_path: Path) -> None:
    with running_system(tmp_path, bodies.GATEWAY_FLAGS) as system:
        system.start_ready_worker(*bodies.WORKER_FLAGS)
        outcome = bodies.run(system, seed=20, count=COUNT)
        assert outcome.wrong == []
        assert outcome.beside
        # The run must include accepted requests and several kinds of refusals.
        assert outcome.statuses.keys() >= {"200", "400", "404", "405", "408", "431"}
        eventually(
            lambda: system.http.get("/v1/status").json()["gateway"]["in_flight"] == 0,
            within_s=30,
            what="no request is left",
        )
