"""Lifeline: a child ends with its supervisor, even if the supervisor is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.deploy.supervisor.process_output import Supervise

FOLLOWS = """
import os, signal, time
from protocol.lifeline import follow_parent
{before}
follow_parent(grace_s=0.2)
os.write(1, b"{name} up\\n")
while True: signal.pause()
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_children_end_when_the_supervisor_is_killed_even_one_that_does_not_listen(
    supervise: Supervise,
) -> None:
    told = supervise(
        gateway=FOLLOWS.format(name="gateway", before=""), worker=FOLLOWS.format(name="worker", before=DEAF)
    )
    told.wait_line("up")
    told.wait_line("up")
    told.signal(signal.SIGKILL)
    told.wait_silence()


def test_grandchild_inherits_neither_the_lifeline_nor_its_variable() -> None:
    grandchild = """
import os, sys
print("ROUNDHOUSE_LIFELINE_FD" in os.environ, os.path.exists("/dev/fd/" + sys.argv[1]))
"""
    child = f"""
import subprocess, sys
from protocol.lifeline import follow_parent
number = os.environ["ROUNDHOUSE_LIFELINE_FD"]
follow_parent()
subprocess.run([sys.executable, "-c", {grandchild!r}, number], close_fds=False, check=True, timeout=10)
"""
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import os" + child],
            env={**os.environ, "ROUNDHOUSE_LIFELINE_FD": str(reader)},
            pass_fds=[reader],
            capture_output=True,
            text=True,
            timeout=15,
            check=True,
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert done.stdout.split() == ["False", "False"]
