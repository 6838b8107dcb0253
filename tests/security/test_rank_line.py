"""The connection between the ranks of a set: strangers are not admitted, read nothing and end nobody."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.sockets import Curve
from tests.faults.ranks import ANSWER
from tests.faults.sets import MODEL, READY_S_MAX, Set
from tests.faults.streams import ask, wait_for
from tests.models.fixtures import model_folder
from tests.ports import free_port, free_ports
from tests.security.strangers import connected, disturb, knock
from tests.system import eventually, running_system
from worker.ranks import rpc
from worker.ranks.line import FollowerLine, LeaderLine, PeerMonitor

WAIT_S = 120.0
QUIET_S = 0.5
OTHERS = {"mlx", f"roundhouse-{os.getuid()}"}
"""What upstream keeps among temporary files, and the runtime directory of a running server."""


@contextlib.contextmanager
def met(endpoint: str, keys: tuple[Curve, Curve] | None) -> Iterator[tuple[LeaderLine, FollowerLine]]:
    """A leader and a follower. `keys`: those of both."""
    own, theirs = keys or (None, None)
    leader = LeaderLine(endpoint, 2, own)
    follower = FollowerLine(leader.endpoint, 1, theirs)
    try:
        yield leader, follower
    finally:
        follower.close()
        leader.close()


@contextlib.contextmanager
def watched(leader: LeaderLine, follower: FollowerLine) -> Iterator[queue.SimpleQueue[str]]:
    """Let the ranks meet, and yield the reasons for which the leader's monitor would end the set."""
    assert follower.send(rpc.RankUp(1, "mac-1"), WAIT_S)
    assert leader.receive(WAIT_S) == rpc.RankUp(1, "mac-1")
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = PeerMonitor(leader.monitor, leader.connections, reasons.put)
    watch.start()
    yield reasons
    watch.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_strangers_beside_ranks_end_nobody_and_are_told_nothing(transport: str, tmp_path: Path) -> None:
    """Also on `ipc`, to which only processes of the same user can connect."""
    endpoint = f"ipc://{tmp_path}/line" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    with met(endpoint, Curve.new_pair()) as (leader, follower):
        disturb(endpoint)
        assert knock(endpoint) == []
        with watched(leader, follower) as reasons:
            with connected(endpoint):
                disturb(endpoint)
                leader.call(rpc.RunStep({"a": [1]}))
                assert knock(endpoint) == []
            with pytest.raises(queue.Empty):
                reasons.get(timeout=QUIET_S)
            assert leader.receive(QUIET_S) is None
            assert follower.receive(WAIT_S) == rpc.RunStep({"a": [1]})


def test_a_second_process_of_the_same_user_does_not_take_the_place_of_a_rank(tmp_path: Path) -> None:
    """Without keys, as for ranks that `mlx.launch` starts on one machine."""
    endpoint = f"ipc://{tmp_path}/line"
    with met(endpoint, None) as (leader, follower), watched(leader, follower) as reasons:
        caller = threading.Timer(0.1, leader.call, [rpc.Reset()])
        caller.start()
        assert knock(endpoint) == []
        caller.join(WAIT_S)
        assert follower.receive(WAIT_S) == rpc.Reset()
        assert leader.receive(QUIET_S) is None
        assert reasons.empty()


def _listeners(processes: list[psutil.Process]) -> Iterator[str]:
    """Yield the endpoints that other processes can connect to."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("all"):
                if each.status == psutil.CONN_LISTEN:
                    yield f"tcp://127.0.0.1:{each.laddr.port}"
                elif each.family == socket.AF_UNIX and isinstance(each.laddr, str) and each.laddr:
                    yield f"ipc://{each.laddr}"


class Strangers:
    """Strangers at all sockets of a set, from its first moment. `ring`: ports that upstream listens on."""

    def __init__(self, served: Set, ring: range) -> None:
        self.endpoints: set[str] = set()
        self.modes: dict[str, int] = {}
        self.received: list[bytes] = []
        self._served, self._ring = served, ring
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            for endpoint in set(_listeners(self._served.members())) - self._upstream():
                self.endpoints.add(endpoint)
                if endpoint.startswith("ipc:"):
                    self._note_mode(Path(endpoint.removeprefix("ipc://")))
                disturb(endpoint)
                self.received += knock(endpoint, 0.1)

    def _upstream(self) -> set[str]:
        return {f"tcp://127.0.0.1:{port}" for port in self._ring}

    def _note_mode(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.modes[str(path)] = stat.S_IMODE(path.parent.stat().st_mode)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for temporary files of the processes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.timeout(600)
def test_strangers_at_a_set_read_nothing(tmp_path: Path, temporary: Path) -> None:
    served = Set(tmp_path)
    try:
        with Strangers(served, served.ring) as strangers:
            members = served.whole()
            served.wait_ready()
            before = ask(served.url, "Count from 1 to 50.", **(ANSWER | {"max_tokens": 50}))
            wait_for([before], WAIT_S)
        assert strangers.received == []
        assert [path for path in strangers.endpoints if path.startswith("tcp:")] == []
        assert set(strangers.modes.values()) == {0o700}
        assert {process.pid for process in served.whole()} == {process.pid for process in members}
        again = ask(served.url, "Count from 1 to 50.", **(ANSWER | {"max_tokens": 50}))
        wait_for([again], WAIT_S)
        assert again.texts == before.texts != [""]
        # Once the ranks have met, nobody can connect any more, not even to upstream's ring.
        left = [each for each in _listeners(members) if not each.startswith("ipc:") or _exists(each)]
        assert left == []
        assert {path.name for path in temporary.iterdir()} <= OTHERS
    finally:
        served.process.stop()
    assert {path.name for path in temporary.iterdir()} <= OTHERS


@pytest.mark.timeout(600)
def test_ranks_by_hand_meet_at_a_private_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ring = tmp_path / "ring.json"
    ring.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    with running_system(tmp_path) as system:
        for rank in range(2):
            flags = f"--model={model_folder(MODEL)}", "--split=tensor"
            told = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(ring)}
            system.start_worker(*flags, module="worker", env=told)
        runtime = tmp_path / "roundhouse"
        eventually(lambda: list(runtime.glob("ranks-*.sock")), within_s=READY_S_MAX, what="bound")
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        system.wait_ready()
        assert list(runtime.iterdir()) == []


def _exists(endpoint: str) -> bool:
    return Path(endpoint.removeprefix("ipc://")).exists()
