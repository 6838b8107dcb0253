"""Each worker death is logged in one line, without any text of its requests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil

from tests.faults.serving import serving
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import eventually

SECRET = "Mellifluous"
ABOARD = r"chatcmpl-\w+ \(decode, \d+\)"


def test_a_death_is_one_line_with_signal_step_and_who_was_aboard(tmp_path: Path) -> None:
    with serving(tmp_path, "--step-ms 20") as served:
        (pid,) = served.workers("ready")
        clients = [ask(served.url, f"{SECRET} !tokens=75") for _ in range(2)]
        wait_until_flowing(clients)
        rows = ["decode", "decode"]  # the log line shows the last reported phases
        eventually(lambda: phases(served.status()) == rows, within_s=10, what="a beat with both")
        psutil.Process(pid).send_signal(signal.SIGABRT)
        wait_for(clients, 60)
        ended = (
            rf"worker \(pid {pid}\) was killed by SIGABRT after \d+\.\d s, "
            rf"at step \d+ with 2 requests in flight: {ABOARD}, {ABOARD}.*; restarting (in|at once)"
        )
        lost = (
            rf"worker for fake \(pid {pid}\) connection lost after step \d+, "
            r"2 requests in flight: chatcmpl-\w+ \(\d+ tokens\), chatcmpl-\w+ \(\d+ tokens\)"
        )
        # Two processes write these lines; the gateway's passes through the supervisor.
        for line in (ended, lost):
            eventually(
                lambda line=line: re.search(line, served.process.log()),
                within_s=10,
                what=f"a line like {line!r} in:\n{served.process.log()}",
            )
        assert SECRET not in served.process.log()


def phases(status: dict[str, list[dict[str, list[dict[str, str]]]]]) -> list[str]:
    return [row["phase"] for worker in status["workers"] for row in worker["rows"]]
