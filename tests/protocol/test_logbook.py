"""What a worker was about is known when it is dead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from protocol.logbook import BYTES_MAX, NAMED_MAX, VARIABLE, Logbook, Page, describe
from protocol.parts import RowStatus

WRITES = """
import os, signal
from protocol.logbook import Logbook
logbook = Logbook(os.environ)
for number in range(100):
    logbook.note(f"at step {number}, " + "and more " * (100 - number))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_line_of_a_child_that_was_killed_can_be_read() -> None:
    page = Page()
    environ = os.environ | {VARIABLE: str(page.fd)}
    child = subprocess.run(
        [sys.executable, "-c", WRITES], env=environ, pass_fds=[page.fd], check=False, timeout=30
    )
    assert child.returncode < 0
    assert page.close() == "at step 99, and more"


def test_who_notes_nothing_or_has_no_logbook_leaves_nothing() -> None:
    Logbook({}).note("unheard")
    page = Page()
    assert page.close() == ""


def test_a_line_is_cut_where_there_is_no_room_for_it() -> None:
    page = Page()
    Logbook({VARIABLE: str(page.fd)}).note("x" * (2 * BYTES_MAX))
    assert page.close() == "x" * BYTES_MAX


def row(number: int, phase: str) -> RowStatus:
    return RowStatus(id=f"chatcmpl-{number}", phase=phase, prompt_tokens=9, prefilled=4, answered=number)


def test_a_line_tells_the_step_and_where_each_request_stands() -> None:
    assert describe(12, [row(1, "waiting"), row(2, "prefill"), row(3, "decode")]) == (
        "at step 12 with 3 requests aboard: chatcmpl-1 (waiting), chatcmpl-2 (prefill, 4 of 9), "
        "chatcmpl-3 (decode, 3)"
    )
    assert describe(12, []) == "idle after step 12"


@pytest.mark.parametrize("beyond", [1, 100])
def test_no_more_than_so_many_are_named(beyond: int) -> None:
    line = describe(1, [row(number, "decode") for number in range(NAMED_MAX + beyond)])
    assert line.endswith(f"chatcmpl-{NAMED_MAX - 1} (decode, {NAMED_MAX - 1}) and {beyond} more")
