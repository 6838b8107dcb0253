"""Malformed requests: a short run of `python -m tests.faults.bodies`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults import bodies, malformed
from tests.faults.bodies import Answer, judge
from tests.faults.malformed import Request
from tests.system import eventually, running_system

COUNT = 400


def test_whatever_is_sent_the_answer_is_orderly_and_nobody_else_notices(tmp_path: Path) -> None:
    with running_system(tmp_path, bodies.GATEWAY_FLAGS) as system:
        system.start_worker(*bodies.WORKER_FLAGS)
        system.wait_ready()
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


def test_a_request_is_repeated_by_its_seed_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def requests(seed: int) -> list[Request]:
        return [malformed.draw(random.Random(f"{seed}/{number}")) for number in range(50)]

    first = requests(1)
    assert first != requests(2)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert requests(1) == first


ERROR = (
    b'{"error": {"message": "No.", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}}'
)
ANTHROPICS = (
    b'{"type": "error", "error": {"type": "invalid_request_error", "message": "\'n\' is wrong."}, '
    b'"request_id": "req_1"}'
)
JSON = {"content-type": "application/json", "x-request-id": "req_1"}


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([], "0 of 1 answers"),
        ([Answer(500, JSON, ERROR)], "status 500"),
        ([Answer(307, JSON, b"")], "status 307"),
        ([Answer(400, {}, ERROR)], "no request id"),
        ([Answer(503, JSON, ERROR)], "503 without Retry-After"),
        ([Answer(400, JSON, b'{"error": {"message": "No."}}')], "an incomplete error object"),
        ([Answer(400, JSON, ERROR.replace(b'"n"', b'"seed"'))], "n was changed"),
        ([Answer(200, JSON | {"content-type": "text/event-stream"}, b'data: {"a": 1}\n\n')], "truncated"),
        ([Answer(400, JSON, b'{"type": "error", "error": {"message": "No."}}')], "not an error envelope"),
        ([Answer(400, JSON, ANTHROPICS.replace(b"'n'", b"'seed'"))], "n was changed"),
        ([Answer(400, JSON, ERROR)], ""),
        ([Answer(400, JSON, ANTHROPICS)], ""),
    ],
)
def test_an_answer_that_is_not_orderly_would_be_noticed(answers: list[Answer], wrong: str) -> None:
    found = judge(Request([b"POST"], changed="n"), answers)
    assert wrong in found
    assert bool(wrong) == bool(found)
