"""Sockets between gateway and workers: permissions, keys, and their folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets, wire
from protocol.common.state_folder import SERVER_NAME_CHARS_MAX, server_name
from protocol.messages import Welcome
from protocol.sockets import Curve, EndpointError
from tests.broker.transport.test_router import Socket, hello, listening, say
from tests.system import free_port

WAIT_S = 20.0


class Line:
    """Factory of both ends' sockets, closed after the test."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self._open: list[Socket] = []

    def router(self, endpoint: str, curve: Curve | None = None) -> Socket:
        return self.keep(sockets.bind_router(self.context, endpoint, curve))

    def dealer(self, endpoint: str, identity: str = "worker", curve: Curve | None = None) -> Socket:
        return self.keep(sockets.connect_dealer(self.context, endpoint, identity, curve))

    def keep(self, socket: Socket) -> Socket:
        socket.sndtimeo = socket.rcvtimeo = int(1000 * WAIT_S)
        self._open.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._open:
            monitor = socket.get_monitor_socket()
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
        self.context.term()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "made"
    sockets.write_keys(folder)
    return folder


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(int(1000 * WAIT_S)), "no message arrived in time"
    return socket.recv_multipart()


# --- endpoints ---------------------------------------------------------------------------------------


OURS = "ipc:///somewhere/line tcp://127.0.0.1:5555 tcp://127.9.9.9:5555 tcp://localhost:5555 tcp://[::1]:1"
REACHABLE = (
    "tcp://0.0.0.0:5555 tcp://*:5555 tcp://10.0.0.1:5555 tcp://[::]:5555 tcp://example.org:5555"
    " tcp://localhost.example.org:5555 tcp://eth0:5555 tcp://:5555"
)


def test_an_endpoint_that_others_can_reach_needs_keys_and_one_on_this_machine_none(keys: Path) -> None:
    for endpoint in OURS.split():
        sockets.check_endpoint(endpoint, None)
    for endpoint in REACHABLE.split():
        with pytest.raises(EndpointError, match="CURVE"):
            sockets.check_endpoint(endpoint, None)
        sockets.check_endpoint(endpoint, Curve.load(keys, "gateway"))


def test_an_endpoint_of_another_kind_is_refused_with_or_without_keys(keys: Path, line: Line) -> None:
    for endpoint in ("", "/somewhere/line", "inproc://line", "http://127.0.0.1:1", "tcp://[::1"):
        for curve in (None, Curve.load(keys, "gateway")):
            with pytest.raises(EndpointError):
                sockets.check_endpoint(endpoint, curve)
            with pytest.raises(EndpointError):
                line.router(endpoint, curve)
            with pytest.raises(EndpointError):
                line.dealer(endpoint, "worker", curve)


# --- the runtime directory ---------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Home folder with a short path, without XDG folders, beside a folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
        home = Path(folder).resolve()
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setattr("tempfile.tempdir", str(home / "temporary"))
        (home / "temporary").mkdir(mode=0o700)
        yield home


@pytest.mark.parametrize("umask", [0, 0o002])  # the latter on systems with a group for each user
def test_the_runtime_directory_is_its_owners_alone_and_without_xdg_runtime_dir_where_nothing_cleans_up(
    umask: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(umask)
    try:
        folder = sockets.runtime_directory()
    finally:
        os.umask(before)
    assert folder == home / ".local" / "state" / "roundhouse" / "run"
    assert mode(folder) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    assert sockets.runtime_directory() == home / "state" / "roundhouse" / "run"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert sockets.runtime_directory() == folder
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert sockets.runtime_directory() == home / "roundhouse"
    assert mode(home / "roundhouse") == 0o700
    assert sockets.default_endpoint("8123") == f"ipc://{home}/roundhouse/8123.sock"
    sockets.check_endpoint(sockets.default_endpoint("8123"), None)


@pytest.mark.parametrize("problem", ["long", "missing", "shared"])
def test_runtime_directory_lies_with_temporary_files_where_the_home_cannot_hold_sockets(
    problem: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem == "long":
        monkeypatch.setenv("HOME", str(home / ("n" * 60)))
    elif problem == "missing":
        monkeypatch.setenv("HOME", "/dev/null/none")
    else:
        (home / ".local").mkdir()
        (home / ".local").chmod(0o777)
    assert sockets.runtime_directory() == home / "temporary" / f"roundhouse-{os.getuid()}"


def test_the_state_of_a_server_is_named_by_its_address() -> None:
    at_default = ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0", "::", "", "127.1", "::ffff:127.0.0.1"]
    named = {
        "8000": at_default,  # the name that earlier versions used
        "8000-127.0.0.2": ["127.0.0.2", "::ffff:7f00:2"],
        "8000-__1": ["::1", "0:0:0:0:0:0:0:1"],
        "8000-box.local": ["box.local", "Box.LOCAL."],
        "8000-878aeee70cf2cde": ["2001:db8:1:2:3:4:5:6", "2001:DB8:1:2:3:4:5:0006"],
        "8000-d6b96a97d147daa": ["../x"],
    }
    for name, hosts in named.items():
        assert {server_name(host, 8000) for host in hosts} == {name}
        assert len(name) <= SERVER_NAME_CHARS_MAX


@pytest.mark.parametrize("trouble", ["open", "theirs", "a link", "no place", "can be swapped"])
def test_a_runtime_directory_that_is_not_ours_alone_is_refused(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "roundhouse"
    match trouble:
        case "open":
            folder.mkdir()
            folder.chmod(0o710)
        case "theirs":
            sockets.runtime_directory()
            uid = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        case "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "no place":
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
        case "can be swapped":
            tmp_path.chmod(0o1777)
            sockets.runtime_directory()
            tmp_path.chmod(0o777)
    wording = {"open": "0700", "theirs": "owned by you", "can be swapped": "by no one else"}.get(trouble)
    with pytest.raises(EndpointError, match=wording):
        sockets.runtime_directory()


def test_a_socket_is_its_owners_alone_wherever_it_was_asked_for(tmp_path: Path, line: Line) -> None:
    before = os.umask(0)
    try:
        line.router(f"ipc://{tmp_path}/line")
        assert mode(tmp_path / "line") & 0o077 == 0
        assert os.umask(0) == 0
    finally:
        os.umask(before)


# --- messages over real sockets ----------------------------------------------------------------------


def test_messages_are_not_queued_for_a_peer_that_is_absent_and_a_worker_finds_a_later_gateway(
    tmp_path: Path, line: Line
) -> None:
    endpoint = f"ipc://{tmp_path}/line"
    dealer = line.dealer(endpoint, "worker")
    with pytest.raises(zmq.Again):
        dealer.send_multipart([b"x"], zmq.NOBLOCK)
    router = line.router(endpoint)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH
    assert dealer.poll(int(1000 * WAIT_S), zmq.POLLOUT)
    dealer.send_multipart(wire.encode(hello("worker")))
    sender, *frames = receive(router)
    assert (sender, wire.decode_to_gateway(frames)[0]) == (b"worker", hello("worker"))
    answer = Welcome(incarnation="gateway", version=1)
    router.send_multipart([sender, *wire.encode(answer)])
    assert wire.decode_to_worker(receive(dealer))[0] == answer


def test_a_message_over_the_limit_never_reaches_the_gateway(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "GATEWAY_FRAME_BYTES_MAX", 1000)
    endpoint = f"ipc://{tmp_path}/line"
    router = line.router(endpoint)
    dealer = line.dealer(endpoint, "worker")
    monitor = dealer.get_monitor_socket()
    assert next_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    dealer.send(b"x" * 1001)
    # The peer is disconnected, reconnects under the same name, and its next message is accepted.
    assert next_event(monitor) == zmq.EVENT_DISCONNECTED
    assert next_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    dealer.send(b"x" * 1000)
    assert receive(router) == [b"worker", b"x" * 1000]


def next_event(monitor: Socket) -> int:
    assert monitor.poll(int(1000 * WAIT_S)), "the connection did not change in time"
    return int(recv_monitor_message(monitor)["event"])


# --- CURVE -------------------------------------------------------------------------------------------


def test_keys_are_made_for_their_owner_and_a_worker_needs_no_secret_of_the_gateways(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    sockets.write_keys(keys)
    gateway, worker = Curve.load(keys, "gateway"), Curve.load(keys, "worker")
    assert mode(keys) == 0o700
    assert mode(keys / "gateway.key_secret") == mode(keys / "worker.key_secret") == 0o600
    assert gateway.secret != worker.secret
    (keys / "gateway.key_secret").unlink()
    assert Curve.load(keys, "worker") == worker


@pytest.mark.parametrize(
    ("file", "trouble", "said"),
    [
        ("gateway.key", "garbage", "CURVE keys"),
        ("worker.key_secret", "missing", "CURVE keys"),
        ("worker.key_secret", "readable", "0600"),
        ("worker.key_secret", "public", "contains no secret"),
    ],
)
def test_keys_that_are_missing_or_no_secret_are_refused(
    file: str, trouble: str, said: str, tmp_path: Path
) -> None:
    sockets.write_keys(tmp_path)
    match trouble:
        case "missing":
            (tmp_path / file).unlink()
        case "garbage":
            (tmp_path / file).write_bytes(b"\xff\xfe nothing of the sort")
        case "readable":
            (tmp_path / file).chmod(0o640)
        case "public":
            (tmp_path / file).write_bytes((tmp_path / "worker.key").read_bytes())
    with pytest.raises(EndpointError, match=said):
        Curve.load(tmp_path, "worker")


REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@pytest.mark.parametrize("stranger", ["with keys of its own", "without keys"])
def test_with_the_keys_messages_pass_both_ways_and_without_them_nobody_is_heard(
    stranger: str, keys: Path, line: Line
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def talk() -> None:
        async with listening(endpoint, keys=keys) as (link, touch):
            # Not with `connect_dealer`: an intruder does not use our code.
            intruder = line.keep(line.context.socket(zmq.DEALER))
            intruder.setsockopt(zmq.IDENTITY, b"intruder")
            monitor = intruder.get_monitor_socket(REFUSALS)
            if stranger == "with keys of its own":
                intruder.curve_publickey, intruder.curve_secretkey = zmq.curve_keypair()
                intruder.curve_serverkey = Curve.load(keys, "worker").gateway_public
            intruder.connect(endpoint)
            with contextlib.suppress(zmq.Again):  # it may have been refused already
                intruder.send_multipart(wire.encode(hello("intruder")))
            assert await asyncio.to_thread(next_event, monitor) & REFUSALS
            dealer = line.dealer(endpoint, "worker", Curve.load(keys, "worker"))
            await say(dealer, hello("worker"))
            assert await touch.next() == ("worker", hello("worker"))
            assert touch.silent
            answer = Welcome(incarnation="gateway", version=1)
            assert link.send("worker", answer)
            assert wire.decode_to_worker(await asyncio.to_thread(receive, dealer))[0] == answer

    asyncio.run(asyncio.wait_for(talk(), WAIT_S))
