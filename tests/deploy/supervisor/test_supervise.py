"""Supervisor with real processes: restarts, stops, and no process left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil

from tests.deploy.supervisor.process_output import Begin, Supervise

SAY = """
import os, signal, sys, time
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
# `signal.pause` could miss a signal that arrives just before it; `sigwait` on a blocked one cannot.
UNTIL_TOLD = """
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
say("{0} up", os.getpid())
signal.sigwait({{signal.SIGTERM}})
say("{0} ended")
"""


def obedient(name: str, first: str = "") -> str:
    """Return a script that prints when it is up and when it gets SIGTERM."""
    return SAY + first + UNTIL_TOLD.format(name)


def deaf(name: str) -> str:
    """Return a script that ignores SIGTERM."""
    return SAY + (
        "signal.signal(signal.SIGTERM, lambda *_: say('no'))\n"
        f"say('{name} up', os.getpid())\n"
        "while True: signal.pause()"
    )


def crashing(name: str, times: int, counter: Path) -> str:
    """Return a script that kills itself on its first `times` starts, and then runs."""
    dies = f"""
with open({str(counter)!r}, "a+") as file:
    file.seek(0)
    lives = len(file.read())
    file.write("x")
say("{name} at", time.monotonic())
if lives < {times}:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    return obedient(name, dies)


def pid_in(line: str) -> int:
    return int(line.split()[-1])


def test_crashed_child_restarts_with_backoff_beside_the_other(supervise: Supervise, tmp_path: Path) -> None:
    told = supervise(gateway=obedient("gateway"), worker=crashing("worker", 2, tmp_path / "lives"))
    up = pid_in(told.wait_line("worker up"))
    _, worker = psutil.Process(told.process.pid).children(recursive=True)
    assert worker.pid == up
    told.signal(signal.SIGTERM)
    assert told.wait() == 0

    text = "\n".join(told.lines)
    lines = re.findall(
        r"warning: worker \(pid \d+\) was killed by SIGKILL after \d\.\d s; restarting in (\S+) s", text
    )
    assert lines == ["0.2", "0.4"]
    births = [float(line.split()[-1]) for line in told.lines if line.startswith("worker at")]
    assert births[1] - births[0] >= 0.2
    assert births[2] - births[1] >= 0.4
    assert sum(line.startswith("gateway up") for line in told.lines) == 1


def test_asked_to_stop_it_stops_each_in_its_turn(supervise: Supervise) -> None:
    # The gateway stops slowly; the worker must not be signalled before it has ended.
    slow = obedient("gateway") + "time.sleep(0.2); say('gateway gone')"
    told = supervise(gateway=slow, worker=obedient("worker"))
    told.wait_line("up")
    told.wait_line("up")
    told.signal(signal.SIGHUP)
    assert told.wait() == 0
    assert told.index("gateway ended") < told.index("gateway gone") < told.index("worker ended")


def test_a_signal_that_lands_on_another_thread_is_heard_at_once(begin: Begin, tmp_path: Path) -> None:
    fifo = tmp_path / "child-is-up"
    os.mkfifo(fifo)
    child = f"open({str(fifo)!r}, 'w').close()"
    script = f"""
import os, signal, sys, threading
from deploy.supervisor.child import Child
from deploy.supervisor.supervisor import Supervisor

def hit_this_thread():
    open({str(fifo)!r}).read()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=hit_this_thread).start()
child = Child("worker", [sys.executable, "-c", {obedient("worker", child)!r}], dict(os.environ))
sys.exit(Supervisor([child]).run())
"""
    assert begin([sys.executable, "-c", script]).wait() == 0


def test_child_ignoring_sigterm_is_killed_after_the_stop_timeout(supervise: Supervise) -> None:
    told = supervise(gateway=deaf("gateway"), worker=obedient("worker"), stop_timeout_s=0.2)
    told.wait_line("up")
    told.wait_line("up")
    told.signal(signal.SIGTERM)
    assert told.wait() == 0
    assert told.index("no") < told.index("gateway did not end within 0.2 s") < told.index("worker ended")
    assert told.index("gateway", "was killed by SIGKILL")


def test_grandchildren_do_not_outlive_their_child(supervise: Supervise) -> None:
    helper = "import signal; signal.pause()"
    script = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {helper!r}])"
    told = supervise(worker=obedient("worker", script))
    os.kill(pid_in(told.wait_line("worker up")), signal.SIGKILL)
    told.wait_line("restarting")
    told.wait_line("worker up")
    told.signal(signal.SIGTERM)
    # The stdout closes only when both helpers, which share it, have ended.
    assert told.wait() == 0


def test_child_has_its_own_session_streams_lifeline_logbook_and_nothing_else(supervise: Supervise) -> None:
    script = """
say("session", os.getsid(0) == os.getpid() == os.getpgrp())  # Ctrl-C does not reach it
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
line, book = (int(os.environ[f"ROUNDHOUSE_{name}_FD"]) for name in ("LIFELINE", "BREADCRUMBS"))
open_ones = [fd for fd in range(256) if is_open(fd)]
say("open:", *(fd for fd in open_ones if fd not in (line, book)), "and", {line, book} <= set(open_ones))
import select; say("parent lives:", select.select([line], [], [], 0) == ([], [], []))
"""
    # The second of two children: an inherited pipe end of its sibling would show here.
    told = supervise(gateway=obedient("gateway"), worker=obedient("worker", script))
    assert told.wait_line("session") == "session True"
    assert told.wait_line("open:") == "open: 0 1 2 and True"
    assert told.wait_line("parent lives:") == "parent lives: True"
