"""Gateway process: assembly of its parts."""

from __future__ import annotations

from pathlib import Path

import zmq

from protocol import wire
from protocol.common.logs import LINES_MAX
from protocol.messages import PROTOCOL_VERSION, Hello
from tests.system import START_S_MAX, eventually, running_system

HELLOS = LINES_MAX + 30


def test_a_worker_that_introduces_itself_without_end_does_not_fill_the_log(tmp_path: Path) -> None:
    with running_system(tmp_path) as system, zmq.Context() as context, context.socket(zmq.DEALER) as worker:
        worker.setsockopt(zmq.IDENTITY, b"w")
        worker.setsockopt(zmq.SNDTIMEO, int(START_S_MAX * 1000))
        worker.setsockopt(zmq.LINGER, 0)
        worker.connect(system.endpoint)
        for number in range(HELLOS):
            hello = Hello(incarnation="w", version=PROTOCOL_VERSION, model=f"m{number}", pid=1)
            worker.send_multipart(wire.encode(hello))
        last = f"/v1/models/m{HELLOS - 1}"
        eventually(
            lambda: system.http.get(last).is_success, within_s=START_S_MAX, what="the last Hello counts"
        )
        said = [line for line in system.gateway.log().splitlines() if "connected (pid 1)" in line]
        assert len(said) == LINES_MAX
