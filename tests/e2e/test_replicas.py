"""`roundhouse serve --replicas 2`, the embedded model, and a worker that joins as if from another machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol import sockets
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import NO_TLS, START_S_MAX, Process, eventually, free_port

STREAMS, TOKENS = 6, 60
ANSWER = 40
"""Tokens of a turn: enough that affinity matters, because cheap requests go to any free worker."""
GREEDY: dict[str, object] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


class Served:
    """The server. `http`: a client of the gateway."""

    def __init__(self, folder: Path) -> None:
        port, join, keys = free_port(), f"tcp://127.0.0.1:{free_port()}", folder / "keys"
        sockets.write_keys(keys)
        env = {"XDG_RUNTIME_DIR": str(folder)}
        flags = ["--replicas=2", f"--port={port}", f"--join={join}", f"--curve-keys={keys}", "--spare=0"]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)
        self.serve = Process("serve", ["deploy", "serve", "--memory-budget=3GiB", *flags], folder, env)
        joining = ["deploy", "worker", f"--endpoint={join}", f"--curve-keys={keys}"]
        self.joined = Process("joined", joining, folder, env)

    def workers(self) -> dict[int, dict[str, Any]]:
        """Return the ready workers by process id."""
        with contextlib.suppress(httpx.TransportError):
            workers = self.http.get("/v1/status").json()["workers"]
            return {worker["pid"]: worker for worker in workers if worker["state"] == "ready"}
        return {}

    def wait(self, count: int) -> None:
        """Wait until `count` workers are ready."""
        eventually(lambda: len(self.workers()) == count, within_s=2 * START_S_MAX, what=f"{count} workers")

    def stop(self) -> None:
        self.http.close()
        for process in (self.serve, self.joined):
            process.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.stop()


@pytest.mark.timeout(1800)
def test_conversation_finds_its_prefix_and_streams_survive_two_of_three_workers(served: Served) -> None:
    served.wait(3)
    go_on_beside_others(served)
    questions = [f"Count from {number} to 90." for number in range(STREAMS)]
    calm = [ask(served.url, question, stream=False, **GREEDY) for question in questions]
    wait_for(calm, 600)
    assert all(worker["dispatched"] for worker in served.workers().values()), "each had some requests"
    streams = [ask(served.url, question, **GREEDY) for question in questions]
    wait_until_flowing(streams)
    replica = next(pid for pid in served.workers() if pid != served.joined.pid)
    os.kill(replica, signal.SIGKILL)
    served.joined.kill()
    wait_for(streams, 600)
    assert [stream.texts for stream in streams] == [answer.texts for answer in calm]
    served.wait(2)
    assert served.joined.pid not in served.workers(), "this supervisor does not restart remote workers"


def go_on_beside_others(served: Served) -> None:
    """Hold a conversation, whose turns must find their prefix whoever else asks meanwhile."""
    said = [{"role": "system", "content": "You answer in short sentences. " * 30}]
    shares = []
    for turn in range(3):
        said.append({"role": "user", "content": f"What comes after {turn}? Say it in your own words."})
        others = [ask(served.url, f"Tell me about {turn} and {other}.", **GREEDY) for other in range(turn)]
        reply = served.http.post("/v1/chat/completions", json={"messages": said, "max_tokens": ANSWER}).json()
        said.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        usage = reply["usage"]
        shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        wait_for(others, 600)
    assert min(shares[1:]) > 0.5
