"""Sets whose ranks are killed or stopped under streams, and the fallback when a rank stays away."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.supervisor import control
from protocol import sockets
from tests.faults.ranks import ANSWER, Siege
from tests.faults.sets import READY_S_MAX, assert_gone, served_set
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import NO_TLS, stable

STREAMS = 3
LONG = ANSWER | {"max_tokens": 1200}
"""Long enough for a rank to be hit before the answer ends."""
SHORT = ANSWER | {"max_tokens": 50}

PYTHON = f"""#!/bin/bash
exec {sys.executable} "$@"
"""
STALL_S = 5.0
SKIPPING = f"""#!/bin/bash
while [[ $1 != worker ]]; do shift; done
PYTHONPATH={Path(__file__).parents[2]} exec {sys.executable} -m tests.faults.skipping "$@"
"""


def interpreter(folder: Path, script: str = PYTHON) -> Path:
    """Return the interpreter of all ranks but the first; deleting it simulates a machine that stays away."""
    python = folder / "python"
    python.write_text(script)
    python.chmod(0o755)
    return python


@pytest.mark.timeout(600)
def test_streams_outlive_stopped_and_waiting_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STALL_TIMEOUT", str(STALL_S))
    with served_set(tmp_path, python=str(interpreter(tmp_path, SKIPPING))) as served:
        siege = Siege(served, STREAMS, tokens=150)
        siege.strike("decode", 1, signal.SIGSTOP)
        siege.strike("ahead", 1, signal.SIGUSR1)  # it soon skips all steps, and the first one waits
        assert "no step for" in served.process.log()
        assert siege.outcome.wrong + siege.outcome.failed == []
        assert siege.outcome.answers == 2 * STREAMS
        # All ranks end with their supervisor.
        members = served.whole()
        served.process.kill()
        served.process.wait()
        assert_gone(members)


@pytest.mark.timeout(600)
def test_streams_go_on_by_the_next_plan_without_a_rank_and_a_reload_leads_back(tmp_path: Path) -> None:
    python, away = interpreter(tmp_path), tmp_path / "away.json"
    host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "python": f"{tmp_path}/absent"}
    away.write_text(json.dumps([host] * 2))
    plans = f"--fallback=@{away}", "--fallback-after=1"
    with served_set(tmp_path, *plans, python=str(python), falls=True) as served:
        [_, second] = served.whole()  # before the streams, which would end meanwhile
        streams = [ask(served.url, "Count from 1 to 200.", **LONG) for _ in range(STREAMS)]
        wait_until_flowing(streams)
        python.unlink()  # simulates a machine that stays away
        second.kill()
        wait_for(streams, 120)
        for stream in streams:
            assert "continued_by" not in stream.documents[0]
            ends = [document for document in stream.documents if "continued_by" in document]
            assert len(ends) == 1, stream.documents[-2:]
            [told] = ends
            assert told["choices"][0]["finish_reason"] == "length"
            assert told["continued_by"] == "dense, one process alone"
        status = httpx.get(f"{served.url}/v1/status", timeout=10, verify=NO_TLS).json()
        assert status["gateway"]["continued_by"] == {"dense, one process alone": STREAMS}
        [worker] = status["workers"]
        assert (worker["stands_in"], worker["plan"]) == (True, "dense, one process alone")
        stable(
            psutil.Process(worker["pid"]).children,
            within_s=READY_S_MAX,
            what="the worker has no rank beside it",
            accept=lambda children: children == [],
        )
        after = ask(served.url, "Count from 1 to 200.", **LONG)
        wait_for([after], 60)
        assert [stream.texts for stream in streams] == [after.texts] * STREAMS
        assert all("continued_by" not in document for document in after.documents)
        said = served.process.log()
        assert said.index("plan 2 of 3 takes over") < said.index("plan 3 of 3 takes over")
        interpreter(tmp_path)
        assert control.order(sockets.control_path(str(served.port)))[0]
        assert len(served.whole()) == served.ranks
        back = ask(served.url, "Count from 1 to 200.", **SHORT)
        wait_for([back], 60)
        assert back.texts[0]
        assert after.texts[0].startswith(back.texts[0])
