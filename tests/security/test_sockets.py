"""Sockets and files of the server: who may connect, where they lie, and that none is left behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from typer.testing import CliRunner

from deploy.command.cli import app
from protocol import sockets
from protocol.sockets import EndpointError
from tests.models.fixtures import model_folder
from tests.ports import free_port
from tests.security.limited_worker import LIMIT
from tests.system import NO_TLS, Process, eventually, running_system

ELSEWHERE = "::1" if sys.platform == "darwin" else "127.0.0.2"
READY_S_MAX = 200.0
GONE_S_MAX = 60.0
CLOSED = "exec {python} -m deploy serve {flags} <&- >&- 2>&-"


class Served:
    """`roundhouse serve` with folders of its own for sockets and temporary files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = free_port()
        self.folder = folder
        self.runtime, self.temporary = folder / "run" / "roundhouse", folder / "tmp"
        self.model = model_folder("dense")  # it loads sooner than the embedded one
        self.own = [f"--port={self.port}", f"--config={folder}/none.toml", "--spare=0"]
        self.flags = [*self.own, f"--model={self.model}"]
        (folder / "none.toml").touch()
        for path, name in ((self.runtime.parent, "XDG_RUNTIME_DIR"), (self.temporary, "TMPDIR")):
            path.mkdir()
            monkeypatch.setenv(name, str(path))
        monkeypatch.setattr("tempfile.tempdir", str(self.temporary))

    def is_ready(self, host: str = "127.0.0.1") -> bool:
        with contextlib.suppress(httpx.TransportError):
            url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/ready"
            return httpx.get(url, timeout=5, verify=NO_TLS).status_code == 200
        return False

    def wait_ready(self, host: str = "127.0.0.1") -> None:
        eventually(lambda: self.is_ready(host), within_s=READY_S_MAX, what=host)

    def left(self) -> set[str]:
        """Return what lies in both folders, but for upstream's compiled kernels."""
        found = [*self.runtime.iterdir(), *self.temporary.iterdir()]
        return {path.name for path in found} - {"mlx"}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


def whole(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def listeners(processes: Sequence[psutil.Process]) -> Iterator[tuple[str, int] | str]:
    """Yield the addresses and paths that other processes can connect to."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("all"):
                if each.family == socket.AF_UNIX:
                    if isinstance(each.laddr, str) and each.laddr:
                        yield each.laddr
                elif each.status == psutil.CONN_LISTEN or not each.raddr:
                    yield each.laddr.ip, each.laddr.port


@pytest.mark.timeout(300)
def test_server_without_standard_streams_has_only_private_sockets_and_stops_cleanly(served: Served) -> None:
    command = CLOSED.format(python=sys.executable, flags=" ".join(served.flags))
    begun = subprocess.Popen(["bash", "-c", command])
    process = psutil.Process(begun.pid)
    try:
        served.wait_ready()
        names = f"{served.port}.sock", f"serve-{served.port}"
        expected = {served.runtime / name for name in names}
        lock = served.runtime / f"{served.port}.lock"
        assert set(listeners(whole(process))) == {("127.0.0.1", served.port), *map(str, expected)}
        assert stat.S_IMODE(served.runtime.stat().st_mode) == 0o700
        assert set(served.runtime.iterdir()) == expected | {lock}
        assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in {*expected, lock}} == {0}
    finally:
        begun.send_signal(signal.SIGTERM)
        assert begun.wait(GONE_S_MAX) == 0
    assert served.left() == set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "numbers", [[signal.SIGKILL], [signal.SIGTERM, signal.SIGINT]], ids=["killed", "at once"]
)
def test_killed_or_stopped_server_leaves_nothing(numbers: Sequence[int], served: Served) -> None:
    serve = Process("serve", ["deploy", "serve", *served.flags], served.folder)
    try:
        if len(numbers) == 1:
            served.wait_ready()
        eventually((served.runtime / f"{served.port}.sock").exists, within_s=READY_S_MAX, what="bound")
        members = whole(serve.stats)
    finally:
        for number in numbers:
            serve.kill(number)
        serve.wait()
    assert psutil.wait_procs(members, timeout=GONE_S_MAX)[1] == []
    assert served.left() == set()


@pytest.mark.timeout(300)
def test_two_addresses(served: Served) -> None:
    current, other = served.folder / "current", served.folder / "other"
    current.symlink_to(served.model)
    shutil.copytree(served.model, other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")

    served.runtime.mkdir(mode=0o700)
    stale = {"program": "x", "host": "x", "port": 1, "pid": 1, "since": 0}
    (served.runtime / f"{served.port}.lock").write_text(json.dumps(stale))

    def begin(host: str, model: Path, **env: str) -> Process:
        flags = [*served.own, f"--host={host}", f"--model={model}"]
        return Process(f"serve-{host}", ["deploy", "serve", *flags], served.folder, env)

    def command(*words: str) -> str:
        told = CliRunner().invoke(app, [*words, f"--port={served.port}"])
        return f"{told.exit_code} {told.output}"

    first, second = begin("127.0.0.1", other, ROUNDHOUSE_API_KEYS="secret"), begin(ELSEWHERE, current)
    try:
        served.wait_ready()
        served.wait_ready(ELSEWHERE)
        assert "requires an API key" in command("chat", "hello")
        current.unlink()
        current.symlink_to(other)
        assert "its files or KV settings have changed" in command("reload", f"--host={ELSEWHERE}")
        assert "MODEL=current\n" in command("launch", "--print", f"--host={ELSEWHERE}")
        pair = f"--host {ELSEWHERE} --port {served.port} (pid {second.pid}), --port {served.port} (pid"
        assert f"; running: {pair} {first.pid})" in command("reload", "--host=127.0.0.9")
        told = command("serve", "--host=127.0.0.9", f"--endpoint=ipc://{served.runtime}/{served.port}.sock")
        assert "is in use by another process" in told
        third = begin("localhost", current)
        assert third.wait(READY_S_MAX) == 78
        assert f"another Roundhouse: roundhouse serve on 127.0.0.1, pid {first.pid}, since" in third.log()
    finally:
        first.stop()
        second.stop()
    assert served.left() == set()


@pytest.mark.timeout(200)
def test_a_worker_starts_with_fewer_open_files_than_upstream_sets(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        flags = "--model", str(model_folder("dense"))
        worker = system.start_ready_worker(*flags, module="tests.security.limited_worker")
        assert worker.stats.rlimit(psutil.RLIMIT_NOFILE) == (LIMIT, LIMIT)


# --- paths that others prepare -----------------------------------------------------------------------


Socket = zmq.Socket[bytes]


@contextlib.contextmanager
def opened(*ends: Callable[[zmq.Context[Socket]], Socket]) -> Iterator[None]:
    """Open sockets one after another."""
    context: zmq.Context[Socket] = zmq.Context()
    made: list[Socket] = []
    try:
        for end in ends:
            made.append(end(context))
        yield
    finally:
        for socket_ in made:
            monitor = socket_.get_monitor_socket()
            socket_.disable_monitor()
            monitor.close(0)
            socket_.close(0)
        context.term()


def gateway(endpoint: str) -> Callable[[zmq.Context[Socket]], Socket]:
    return lambda context: sockets.bind_router(context, endpoint, None)


def worker(endpoint: str) -> Callable[[zmq.Context[Socket]], Socket]:
    return lambda context: sockets.connect_dealer(context, endpoint, "worker", None)


@pytest.mark.parametrize("path", ["line", "absent/line"])
@pytest.mark.parametrize("end", [gateway, worker])
def test_a_socket_in_a_folder_that_others_can_write_to_is_refused_at_both_ends(
    end: Callable[[str], Callable[[zmq.Context[Socket]], Socket]], path: str, tmp_path: Path
) -> None:
    for mode in (0o777, 0o1777, 0o720, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(EndpointError, match="by no one else"), opened(end(f"ipc://{tmp_path}/{path}")):
            pass


def test_a_file_at_the_path_of_a_socket_is_kept(tmp_path: Path) -> None:
    file, link = tmp_path / "precious", tmp_path / "line"
    file.write_text("precious")
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(EndpointError, match="is not a socket"), opened(gateway(f"ipc://{path}")):
            pass
        assert path.read_text() == "precious"
    long = gateway(f"ipc://{tmp_path}/{'x' * 200}")
    with pytest.raises(EndpointError, match="the path has more than"), opened(long):
        pass


def test_a_socket_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "line"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert not sockets.remove_stale(path)
        assert path.exists()
    assert path.exists()
    assert sockets.remove_stale(path)
    assert not path.exists()
    assert sockets.remove_stale(path)


def test_a_socket_that_another_process_has_bound_since_is_kept(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/line"
    with opened(gateway(endpoint)):
        ours = sockets.SocketFile(endpoint)
        with opened(gateway(endpoint)):
            ours.remove()
            assert (tmp_path / "line").exists()
            sockets.SocketFile(endpoint).remove()
            assert list(tmp_path.iterdir()) == []
