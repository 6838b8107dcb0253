"""The DEALER socket: how much it receives before other work has its turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from protocol import sockets, wire
from protocol.messages import Cancel
from tests.system import eventually
from worker.gateway import dealer
from worker.gateway.dealer import DealerLink

WAIT_MS = 10_000
MOST = 4


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = sockets.bind_router(context, f"ipc://{tmp_path}/line", None)
    yield router
    monitor = router.get_monitor_socket()
    router.disable_monitor()
    monitor.close(0)
    router.close(0)
    context.term()


def test_a_gateway_that_never_stops_talking_leaves_time_for_others(
    router: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer, "_RECEIVES_AT_ONCE", MOST)
    line = DealerLink(f"ipc://{tmp_path}/line", "worker-1", None)
    poller = sockets.poller(*line.readable)
    while not line.connected:
        assert poller.poll(WAIT_MS)
        list(line.changes())
    sent = [str(number) for number in range(3 * MOST)]

    def send(id: str) -> bool:
        with contextlib.suppress(zmq.ZMQError):  # the router may not have the worker's identity yet
            router.send_multipart([b"worker-1", *wire.encode(Cancel(incarnation="gateway-1", id=id))])
            return True
        return False

    for id in sent:
        eventually(partial(send, id), within_s=WAIT_MS / 1000, what="the router knows the worker")
    received: list[str] = []
    while len(received) < len(sent):
        assert poller.poll(WAIT_MS)  # the remaining messages wake it again
        found = [message.id for message, _ in line.receive() if isinstance(message, Cancel)]
        assert len(found) <= MOST
        received += found
    assert received == sent
    line.close()
