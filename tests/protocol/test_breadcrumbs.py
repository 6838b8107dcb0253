"""Breadcrumbs: the last state of a worker can be read after its end."""

from __future__ import annotations

import os
import subprocess
import sys

from protocol.breadcrumbs import BYTES_MAX, NAMED_MAX, VARIABLE, BreadcrumbSlot, BreadcrumbWriter, describe
from protocol.types import RequestStatus

WRITES = """
import os, signal
from protocol.breadcrumbs import BreadcrumbWriter
logbook = BreadcrumbWriter(os.environ)
for number in range(100):
    logbook.note(f"at step {number}, " + "and more " * (100 - number))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_line_of_a_child_that_was_killed_can_be_read() -> None:
    page = BreadcrumbSlot()
    environ = os.environ | {VARIABLE: str(page.fd)}
    child = subprocess.run(
        [sys.executable, "-c", WRITES], env=environ, pass_fds=[page.fd], check=False, timeout=30
    )
    assert child.returncode < 0
    assert page.close() == "at step 99, and more"


def test_a_line_is_cut_where_there_is_no_room_for_it() -> None:
    BreadcrumbWriter({}).note("unheard")
    for length in (0, 2 * BYTES_MAX):
        page = BreadcrumbSlot()
        if length:
            BreadcrumbWriter({VARIABLE: str(page.fd)}).note("x" * length)
        assert page.close() == "x" * min(length, BYTES_MAX)


def row(number: int, phase: str) -> RequestStatus:
    return RequestStatus(id=f"chatcmpl-{number}", phase=phase, prompt_tokens=9, prefilled=4, answered=number)


def test_a_line_tells_the_step_and_where_each_request_stands() -> None:
    assert describe(12, [row(1, "waiting"), row(2, "prefill"), row(3, "decode")]) == (
        "at step 12 with 3 requests in flight: chatcmpl-1 (waiting), chatcmpl-2 (prefill, 4 of 9), "
        "chatcmpl-3 (decode, 3)"
    )
    assert describe(12, []) == "idle after step 12"
    line = describe(1, [row(number, "decode") for number in range(NAMED_MAX + 100)])
    assert line.endswith(f"chatcmpl-{NAMED_MAX - 1} (decode, {NAMED_MAX - 1}) and 100 more")
