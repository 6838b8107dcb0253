"""Names of servers' state, and the lock by which one process owns it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.server_lock import OwnedError, ServerLock, running_servers
from protocol.state_folder import SERVER_NAME_CHARS_MAX, server_name

OWNER = """
import sys
from protocol.server_lock import ServerLock
lock = ServerLock("roundhouse serve", sys.argv[1], int(sys.argv[2]))
print(flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "roundhouse"


def owner(host: str, port: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", OWNER, host, str(port)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        # What clients reach at 127.0.0.1: the names that earlier versions used.
        (("127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0", "::", "", "127.1", "::ffff:127.0.0.1"), "8000"),
        (("127.0.0.2", "::ffff:7f00:2"), "8000-127.0.0.2"),
        (("::1", "0:0:0:0:0:0:0:1"), "8000-__1"),
        (("box.local", "Box.LOCAL."), "8000-box.local"),
        (("2001:db8:1:2:3:4:5:6", "2001:DB8:1:2:3:4:5:0006"), "8000-878aeee70cf2cde"),
        (("../../x",), None),
    ],
)
def test_the_state_of_a_server_is_named_by_its_address(hosts: tuple[str, ...], name: str | None) -> None:
    names = {server_name(host, 8000) for host in hosts}
    assert name is None or names == {name}
    [found] = names
    assert len(found) <= SERVER_NAME_CHARS_MAX
    assert "/" not in found


def test_a_second_owner_is_refused_by_name_and_a_dead_one_hinders_nobody(runtime: Path) -> None:
    first, other = owner("0.0.0.0", 8000), owner("::1", 8000)
    with pytest.raises(OwnedError, match=rf"^roundhouse serve on 0.0.0.0, pid {first.pid}, since 2\d\d\d-"):
        ServerLock("roundhouse serve", "localhost", 8000)
    expected = f"; running: --host ::1 --port 8000 (pid {other.pid}), --port 8000 (pid {first.pid})"
    assert running_servers() == expected
    first.kill()
    first.communicate()
    assert running_servers() == f"; running: --host ::1 --port 8000 (pid {other.pid})"
    lock = ServerLock("roundhouse serve", "127.0.0.1", 8000)
    other.communicate()
    assert [path.name for path in runtime.iterdir()] == ["8000.lock"]
    lock.release()
    lock.release()
    assert list(runtime.iterdir()) == []
