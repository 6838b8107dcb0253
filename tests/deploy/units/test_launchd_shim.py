"""launchd shim: counts starts, and hands sockets on to the process."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.units.launchd_shim import ask_for_sockets, note_start

ROOT = Path(__file__).resolve().parents[3]
WINDOW_S = 300.0

Numbers = ctypes.POINTER(ctypes.c_int)
ACTIVATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Numbers), ctypes.POINTER(ctypes.c_size_t)
)


def launched(folder: Path, starts_max: int, *command: str) -> subprocess.CompletedProcess[str]:
    flags = [f"--starts-file={folder / 'starts'}", f"--starts-max={starts_max}"]
    return subprocess.run(
        [sys.executable, "-m", "deploy.units.launchd_shim", *flags, "--", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@given(st.lists(st.floats(0, 200), max_size=40), st.integers(1, 8))
def test_no_more_starts_than_so_many_are_allowed_within_the_window(
    tmp_path_factory: pytest.TempPathFactory, pauses_s: list[float], starts_max: int
) -> None:
    file = tmp_path_factory.mktemp("starts") / "file"
    now, starts = 1e9, []
    for pause_s in pauses_s:
        now += pause_s
        within = sum(1 for start in starts if now - start <= WINDOW_S)
        allowed = note_start(file, starts_max, now, WINDOW_S)
        assert allowed == (within < starts_max)
        starts += [now] if allowed else []


def test_a_clock_that_was_set_back_and_a_damaged_file_keep_nobody_down(tmp_path: Path) -> None:
    file = tmp_path / "starts"
    assert note_start(file, 1, 2e9, WINDOW_S)
    assert note_start(file, 1, 1e9, WINDOW_S)
    file.write_text("1e9\nrubbish")
    assert note_start(file, 1, 1e9, WINDOW_S)


def test_a_file_that_cannot_be_written_keeps_nobody_down(tmp_path: Path) -> None:
    assert note_start(tmp_path, 1, 1e9, WINDOW_S)  # not writable: it is a folder
    assert note_start(tmp_path / "missing" / "starts", 1, 1e9, WINDOW_S)


def test_a_process_that_keeps_failing_is_let_be_with_a_status_that_launchd_takes_for_success(
    tmp_path: Path,
) -> None:
    fails = [sys.executable, "-c", "raise SystemExit(78)"]
    assert [launched(tmp_path, 2, *fails).returncode for _ in range(3)] == [78, 78, 0]
    assert "started 2 times within 300 s, giving up" in launched(tmp_path, 2, *fails).stderr


def test_the_command_takes_its_place_and_gets_every_word(tmp_path: Path) -> None:
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = launched(tmp_path, 1, sys.executable, "-c", script, "--socket=x", "--", "a b")
    assert json.loads(done.stdout) == ["--socket=x", "--", "a b"]


def test_a_command_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    done = launched(tmp_path, 1, "/nonexistent/python")
    assert done.returncode == 78
    assert done.stderr.startswith("roundhouse service: cannot start /nonexistent/python")


def library(answer: Callable[[bytes], tuple[int, list[int]]]) -> SimpleNamespace:
    """Return a libSystem stand-in whose function writes through pointers, as ctypes expects."""
    kept: list[Any] = []  # keeps the arrays alive, which the real function's caller owns

    def activate(name: bytes, numbers: Any, count: Any) -> int:
        error, found = answer(name)
        kept.append((ctypes.c_int * len(found))(*found))
        numbers[0] = ctypes.cast(kept[-1], Numbers)
        count[0] = len(found)
        return error

    return SimpleNamespace(launch_activate_socket=ACTIVATE(activate))


def test_sockets_are_asked_for_by_name_and_read_from_where_launchd_puts_them() -> None:
    assert ask_for_sockets("http", library(lambda name: (0, [7, 9] if name == b"http" else []))) == [7, 9]


def test_launchd_refusal_is_an_error() -> None:
    with pytest.raises(ProcessLookupError):
        ask_for_sockets("http", library(lambda _: (3, [])))


def test_sockets_come_to_the_command_in_their_places_and_nowhere_else() -> None:
    # Listed in an order in which each descriptor has a number that another one needs.
    script = """
import os, socket, sys
from deploy.units.launchd_shim import hand_over
made = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
ports = [s.getsockname()[1] for s in made]
for place, s in zip((5, 3, 4), [os.dup(s.fileno()) for s in made][:3]):
    os.dup2(s, place + 20); os.set_inheritable(place + 20, True)
for place in (5, 3, 4): os.dup2(place + 20, place)
for place in (5, 3, 4): os.close(place + 20)
hand_over([5, 3, 4], os.environ, os.getpid())
print(*ports, flush=True)
check = '''
import os, socket
def port(fd):
    try: return socket.socket(fileno=fd).getsockname()[1]
    except OSError: return 0
found = {fd: port(fd) for fd in range(3, 64)}
print(*[found[fd] for fd in (3, 4, 5)], sum(p != 0 for p in found.values()))
print(os.environ["LISTEN_PID"] == str(os.getpid()), os.environ["LISTEN_FDS"])
'''
os.execv(sys.executable, [sys.executable, "-c", check])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    ports, found, told = done.stdout.splitlines()
    assert found == f"{ports} 3"
    assert told == "True 3"
