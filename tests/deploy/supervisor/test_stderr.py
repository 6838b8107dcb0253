"""Stderr of a child: its last error line, and complete forwarding to the log."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.supervisor.stderr import LINES_KEPT, WORDS_MAX, QuietTerminal, Stderr, stderr_tail
from tests.deploy.supervisor.process_output import Supervise

WAIT_S = 10.0
METAL = "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Out of memory"
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "worker/core/engine_core.py", line 3, in run',
    "    step()",
]


def record(level: str, message: str, **fields: str) -> str:
    return json.dumps({"time": 1.0, "level": level, "process": "worker", "message": message, **fields})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["12:00:00 worker   warning: dropped a message: x", ""], ""),
        (["roundhouse worker: port: wrong (from --port)"], "roundhouse worker: port: wrong (from --port)"),
        # Stack dumps are ignored.
        (["12:00:00 worker   error: over", "Thread 0x7f (most recent call first):", '  File "x"'], "over"),
        # An error followed by normal lines is not the cause of the end.
        (["12:00:00 worker   error: no space left", "12:00:09 worker   serving fake"], ""),
        # Only the type of an exception, whose message may quote a prompt.
        ([*TRACEBACK, "ValueError: cannot tokenize 'my secret'"], "ValueError"),
        (
            [record("critical", "it ended: KeyError('my secret')", traceback="my secret")],
            "it ended: KeyError",
        ),
        (["\x1b[31mred\x07"], "[31mred"),
    ],
)
def test_the_last_words_are_the_last_line_that_tells_of_an_end(lines: list[str], words: str) -> None:
    assert stderr_tail(lines) == words


@given(st.lists(st.text(max_size=300), max_size=5))
def test_last_words_are_one_short_printable_line_whatever_was_written(lines: list[str]) -> None:
    words = stderr_tail(lines)
    assert words.isprintable()
    assert len(words) <= WORDS_MAX


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=50), max_size=20))
def test_all_that_is_written_is_passed_on_in_order(chunks: list[bytes]) -> None:
    reader, writer = os.pipe()
    stderr = Stderr("child", to=writer, write_s_max=0.01)
    for chunk in chunks:
        os.write(stderr.writer, chunk)
    stderr.close()
    os.close(writer)
    with os.fdopen(reader, "rb") as passed_on:
        written = b"".join(chunks)
        ended = not written or written.endswith((b"\n", b"\r"))
        assert passed_on.read() == (written if ended else written + b"\n")
    assert not any(thread.name == "stderr-child" for thread in threading.enumerate())


def test_a_log_that_is_not_read_just_now_does_not_hold_the_child_up() -> None:
    reader, writer = os.pipe()
    stderr = Stderr("child", to=writer, write_s_max=0.01)
    words: queue.SimpleQueue[str] = queue.SimpleQueue()

    def live() -> None:
        for _ in range(2 * LINES_KEPT):
            os.write(stderr.writer, b"x" * 4096 + b"\n")
        os.write(stderr.writer, METAL.encode())
        words.put(stderr.close())

    threading.Thread(target=live, daemon=True).start()
    try:
        assert words.get(timeout=WAIT_S) == METAL
    finally:
        os.close(reader)
        os.close(writer)


def test_a_helper_that_holds_the_stderr_does_not_hide_the_death(supervise: Supervise, tmp_path: Path) -> None:
    note = tmp_path / "helper"
    helper = "import signal; signal.pause()"
    script = f"""
import os, subprocess, sys
command = [sys.executable, "-c", {helper!r}]
helper = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
open({str(note)!r}, "w").write(str(helper.pid))
os._exit(3)
"""
    told = supervise(worker=script, limits={"deaths_max": 0})
    try:
        told.wait_line("exited with status 3", "giving up")
        assert told.wait() == 1
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_child_stderr_precedes_the_report_of_its_exit_with_the_last_words(supervise: Supervise) -> None:
    lines = 10 * LINES_KEPT
    script = f"import os, sys; sys.stderr.write('line\\n' * {lines} + {METAL!r} + '\\n'); os.abort()"
    told = supervise(worker=f"{script}", limits={"deaths_max": 0})
    assert f"last output '{METAL}'" in told.wait_line("worker (pid", "SIGABRT")
    assert (told.lines.count("line"), told.lines.count(METAL)) == (lines, 1)
    assert told.wait() == 1


def test_quiet_terminal_gets_warnings_and_foreign_lines_and_the_exit_message_is_complete() -> None:
    reader, writer = os.pipe()
    quiet = QuietTerminal(writer)
    shown = ["12:00:01 worker   warning: it is slow", record("info", "as it was asked for"), METAL]
    routine = ["12:00:00 worker   ready in 3 s", "12:00:00 gateway  stopping: 0 requests in flight"]
    stderr = Stderr("worker", writer, quiet=quiet)
    os.write(stderr.writer, "".join(f"{line}\n" for line in [*routine, *shown]).encode())
    assert stderr.close() == METAL
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read().splitlines() == shown


def test_quiet_terminal_is_told_of_a_stop_once_and_then_gets_errors_only() -> None:
    reader, writer = os.pipe()
    quiet = QuietTerminal(writer)
    quiet.stop("SIGINT")
    quiet.stop("SIGINT")
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "\rStopping; Ctrl-C again stops at once.\n".replace("\r", "\n")
    assert not quiet.shows("12:00:01 worker   warning: connection to the gateway lost; reconnecting\n")
    assert quiet.shows("12:00:01 worker   error: no space left\n")
