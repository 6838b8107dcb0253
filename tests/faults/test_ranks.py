"""Sets whose ranks die or are stopped under streams, and the plan that takes over where one stays away."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.falls import interpreter
from tests.faults.ranks import ANSWER, Siege
from tests.faults.sets import assert_gone, served_set
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import NO_TLS, eventually

STREAMS = 4
LONG = ANSWER | {"max_tokens": 1000}
"""Whoever ends a rank has time to do so before the answer has ended."""


@pytest.mark.timeout(300)
def test_streams_outlive_a_rank_that_is_killed_and_one_that_is_stopped(tmp_path: Path) -> None:
    with served_set(tmp_path) as served:
        siege = Siege(served, STREAMS)
        siege.strike("decode", 1, signal.SIGKILL)
        siege.strike("prefill", 1, signal.SIGSTOP)
    assert siege.outcome.wrong + siege.outcome.failed == []
    assert siege.outcome.answers == 2 * STREAMS


@pytest.mark.timeout(300)
def test_nothing_of_a_set_outlives_its_supervisor(tmp_path: Path) -> None:
    with served_set(tmp_path, mode="tensor") as served:
        members = served.whole()
        served.process.kill()
        served.process.wait()
        assert_gone(members)


@pytest.mark.timeout(300)
def test_streams_go_on_by_the_second_plan_when_a_rank_stays_away(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    with served_set(tmp_path, "--fallback-after=2", python=str(python), falls=True) as served:
        [alone] = [ask(served.url, "Count from 1 to 200.", **LONG)]
        wait_for([alone], 60)
        streams = [ask(served.url, "Count from 1 to 200.", **LONG) for _ in range(STREAMS)]
        wait_until_flowing(streams)
        python.unlink()  # a machine that does not come back
        served.whole()[1].kill()
        wait_for(streams, 120)
        assert [stream.texts for stream in streams] == [alone.texts] * STREAMS
        for stream in streams:
            assert "continued_by" not in stream.documents[0]
            [told] = [document for document in stream.documents if "continued_by" in document]
            assert told["choices"][0]["finish_reason"] == "length"
            assert told["continued_by"] == "dense, one process alone"
        status = httpx.get(f"{served.url}/v1/status", timeout=10, verify=NO_TLS).json()
        assert status["gateway"]["continued_by"] == {"dense, one process alone": STREAMS}
        [worker] = status["workers"]
        assert (worker["stands_in"], worker["plan"]) == (True, "dense, one process alone")
        assert psutil.Process(worker["pid"]).children() == []
        after = ask(served.url, "Count from 1 to 200.", **LONG)
        wait_for([after], 60)
        assert after.texts == alone.texts
        assert all("continued_by" not in document for document in after.documents)
        eventually(lambda: "its second plan takes over" in served.process.log(), within_s=5, what="said")
