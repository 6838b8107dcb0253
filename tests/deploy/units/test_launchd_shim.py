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
from hypothesis import given, settings
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


@pytest.fixture(scope="module")
def starts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts") / "file"


@settings(max_examples=30)
@given(pauses_s=st.lists(st.floats(0, 200), max_size=40), starts_max=st.integers(1, 8))
def test_no_more_starts_than_so_many_are_allowed_within_the_window(
    starts_file: Path, pauses_s: list[float], starts_max: int
) -> None:
    starts_file.unlink(missing_ok=True)
    now, starts = 1e9, list[float]()
    for pause_s in pauses_s:
        now += pause_s
        within = sum(1 for start in starts if now - start <= WINDOW_S)
        allowed = note_start(starts_file, starts_max, now, WINDOW_S)
        assert allowed == (within < starts_max)
        starts += [now] if allowed else []


def test_a_clock_set_back_or_a_damaged_or_unwritable_file_keeps_nobody_down(tmp_path: Path) -> None:
    file = tmp_path / "starts"
    assert note_start(file, 1, 2e9, WINDOW_S)
    assert note_start(file, 1, 1e9, WINDOW_S)
    file.write_text("1e9\nrubbish")
    assert note_start(file, 1, 1e9, WINDOW_S)
    assert note_start(tmp_path, 1, 1e9, WINDOW_S)  # not writable: it is a folder
    assert note_start(tmp_path / "missing" / "starts", 1, 1e9, WINDOW_S)


def test_a_command_gets_every_word_until_it_has_failed_too_often(tmp_path: Path) -> None:
    script = "import json, sys; print(json.dumps(sys.argv[1:])); raise SystemExit(78)"
    fails = [sys.executable, "-c", script, "--socket=x", "--", "a b"]
    first, last = launched(tmp_path, 1, *fails), launched(tmp_path, 1, *fails)
    assert (first.returncode, json.loads(first.stdout)) == (78, ["--socket=x", "--", "a b"])
    # launchd takes this status for success, and lets it be.
    assert (last.returncode, last.stdout) == (0, "")
    assert "started 1 times within 300 s, giving up" in last.stderr
    absent = launched(tmp_path, 2, "/nonexistent/python")
    assert absent.returncode == 0
    assert absent.stderr.startswith("roundhouse service: cannot start /nonexistent/python")


@pytest.mark.parametrize(
    "module",
    [
        "broker --port=many",
        "worker --model=/nonexistent/model --host=127.0.0.1 --port=many",
        "deploy serve --model=/nonexistent/model --port=42801",
        "deploy.units.worker_with_spare --port=many",
    ],
    ids=["gateway", "worker", "serve", "worker with a spare"],
)
def test_wrong_settings_are_status_0_which_launchd_does_not_restart_and_78_elsewhere(
    tmp_path: Path, module: str
) -> None:
    command = [sys.executable, "-m", *module.split()]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False).returncode == 78
    done = launched(tmp_path, 1, *command)
    assert done.returncode == 0
    assert done.stderr.startswith("roundhouse")


def test_child_of_a_job_that_launchd_runs_has_its_own_status(tmp_path: Path) -> None:
    parent = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    child = [sys.executable, "-m", "broker", "--port=many"]
    assert launched(tmp_path, 2, sys.executable, "-c", parent, *child).returncode == 78
    assert launched(tmp_path, 2, *child).returncode == 0


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


def test_sockets_are_asked_for_by_name_and_a_refusal_is_an_error() -> None:
    assert ask_for_sockets("http", library(lambda name: (0, [7, 9] if name == b"http" else []))) == [7, 9]
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
