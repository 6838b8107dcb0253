"""Worker processes with a scripted gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.messages import Heartbeat, new_incarnation
from tests.system import Process
from tests.worker.gateway.fake_gateway import Gateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path)
    yield gateway
    gateway.end()


Start = Callable[..., Process]


@pytest.fixture
def start(gateway: Gateway, tmp_path: Path) -> Iterator[Start]:
    """Start workers for the tests that end theirs, or that need settings of their own."""
    started: list[Process] = []

    def start_worker(*flags: str) -> Process:
        started.append(scripted_worker(tmp_path, gateway.endpoint, *flags))
        return started[-1]

    yield start_worker
    for process in started:
        process.stop()


def scripted_worker(folder: Path, endpoint: str, *flags: str) -> Process:
    """Start a worker. One that a test leaves running gets little time to exit."""
    arguments = ["tests.scripted_worker", "--endpoint", endpoint, "--drain-timeout", "0.2", *flags]
    return Process("worker", arguments, folder)


@dataclass(frozen=True)
class SharedWorker:
    """A worker for the tests that leave it running, and the folder of its gateways' socket."""

    process: Process
    folder: Path


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorker]:
    folder = tmp_path_factory.mktemp("shared")
    process = scripted_worker(folder, f"ipc://{folder}/line", "--step-ms", "5", "--max-running", "2")
    yield SharedWorker(process, folder)
    process.stop()


@pytest.fixture
def next_gateway(worker: SharedWorker) -> Iterator[Gateway]:
    """The next gateway of the shared worker, which does not know it yet and has no requests."""
    gateway = Gateway(worker.folder)
    gateway.incarnation = new_incarnation()
    try:
        gateway.meet()
        gateway.until(Heartbeat, lambda beat: not beat.running + beat.waiting)
        gateway.die()
        yield gateway
    finally:
        gateway.end()


@pytest.fixture
def met(next_gateway: Gateway) -> Gateway:
    next_gateway.meet()
    return next_gateway
