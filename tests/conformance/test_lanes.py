"""`make conformance`: its lanes, their drivers, and when they have passed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.conformance.__main__ import SMOKES
from tests.conformance.drivers import DRIVERS, drivers_in
from tests.conformance.judge import complaint
from tests.conformance.programs import Outcome, count_of, run
from tests.conformance.servers import HOUSES
from tests.system import eventually


def test_all_of_something_and_status_0_have_passed() -> None:
    assert count_of("OK a\n1/1\n  0/12 \n\n") == (0, 12)
    assert count_of("2/2\nTraceback\n") is None, "it failed after the count"
    assert Outcome("a", 0, (3, 3)).passed
    assert Outcome("a", 0, must_count=False).passed
    for status, count in ((0, (2, 3)), (0, (0, 0)), (-9, (3, 3)), (0, None)):
        assert not Outcome("a", status, count).passed


@pytest.mark.parametrize(("event", "is_end"), [("model", True), ("message_stop", True), ("ping", False)])
def test_a_stream_must_have_its_end(event: str, *, is_end: bool) -> None:
    headers = {"x-request-id": "a", "content-type": "text/event-stream"}
    body = f'event: {event}\ndata: {{"type": "{event}"}}\n\n'.encode()
    assert (complaint("/v1/models/load", 200, headers, body, is_head=False) == "") == is_end


def test_a_success_is_a_document_or_a_file_where_there_are_files() -> None:
    def is_well(path: str, kind: str, status: int = 200) -> bool:
        headers = {"x-request-id": "a", "content-type": kind}
        return not complaint(path, status, headers, b"{}", is_head=False)

    content, results = "/v1/files/{id}/content", "/v1/messages/batches/{id}/results"
    assert is_well(content, "application/octet-stream")
    assert is_well(results, "application/x-jsonl")
    assert is_well("/v1/files", "application/json")
    assert not is_well(content, "application/x-jsonl")
    assert not is_well(content, "application/octet-stream", status=404)
    assert not is_well("/v1/files", "application/octet-stream")


def test_a_program_is_counted_and_its_children_end_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"import subprocess, sys; open('pid', 'w').write(str({sleeper}.pid))\n"
    code += "print('well', file=sys.stderr); print('1/2'); sys.exit(3)"
    outcome = run("a", [sys.executable, "-uc", code], os.environ, tmp_path)
    assert (outcome.status, outcome.count) == (3, (1, 2))
    assert capsys.readouterr().out == "well\n1/2\n"
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), within_s=10, what="it has ended")


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_all_smokes_are_driven_and_each_environment_and_lane_has_one() -> None:
    drivers, others = drivers_in(SMOKES)
    assert not others
    assert {driver.environment.name for driver in drivers} == {made.name for made in DRIVERS.values()}
    for house in HOUSES.values():
        assert any(house.concerns(driver) for driver in drivers)
