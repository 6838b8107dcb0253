"""Lifeline: a child ends with its supervisor, even if the supervisor is killed."""

from __future__ import annotations

import signal

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


def test_children_end_when_the_supervisor_is_killed_even_without_listening(supervise: Supervise) -> None:
    told = supervise(
        gateway=FOLLOWS.format(name="gateway", before=""), worker=FOLLOWS.format(name="worker", before=DEAF)
    )
    told.wait_line("up")
    told.wait_line("up")
    told.signal(signal.SIGKILL)
    told.wait_silence()
