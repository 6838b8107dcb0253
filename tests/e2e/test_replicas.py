"""`roundhouse serve --replicas 2`, the embedded model, and a worker that joins as if from another machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import sockets
from tests.faults.several import Server
from tests.faults.streams import ask, wait_for, wait_until_flowing
from tests.system import START_S_MAX, Process, eventually, free_port

STREAMS, TOKENS = 6, 60
ANSWER = 40
"""Tokens of a turn: enough that affinity matters, because cheap requests go to any free worker."""
GREEDY: dict[str, object] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


class Served(Server):
    """The server, with a worker that joins."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        join, keys, env = f"tcp://127.0.0.1:{free_port()}", folder / "keys", {"XDG_RUNTIME_DIR": str(folder)}
        sockets.write_keys(keys)
        own = f"--curve-keys={keys}"
        flags = ["--replicas=2", f"--port={self._port}", f"--join={join}", own, "--spare=0"]
        self.process = Process("serve", ["deploy", "serve", "--memory-budget=3GiB", *flags], folder, env)
        self.joined = Process("joined", ["deploy", "worker", f"--endpoint={join}", own], folder, env)

    def wait(self, count: int) -> None:
        """Wait until `count` workers are ready."""
        what = f"{count} workers"
        eventually(lambda: len(self.workers("ready")) == count, within_s=2 * START_S_MAX, what=what)

    def close(self) -> None:
        super().close()
        self.joined.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with contextlib.closing(Served(tmp_path)) as served:
        yield served


@pytest.mark.timeout(1800)
def test_conversation_finds_its_prefix_and_streams_survive_two_of_three_workers(served: Served) -> None:
    served.wait(3)
    go_on_beside_others(served)
    questions = [f"Count from {number} to 90." for number in range(STREAMS)]
    calm = [ask(served.url, question, stream=False, **GREEDY) for question in questions]
    wait_for(calm, 600)
    assert all(worker["dispatched"] for worker in served.status()["workers"]), "each had some requests"
    streams = [ask(served.url, question, **GREEDY) for question in questions]
    wait_until_flowing(streams)
    replica = next(pid for pid in served.workers("ready") if pid != served.joined.pid)
    os.kill(replica, signal.SIGKILL)
    served.joined.kill()
    wait_for(streams, 600)
    assert [stream.texts for stream in streams] == [answer.texts for answer in calm]
    served.wait(2)
    assert served.joined.pid not in served.workers("ready"), "this supervisor does not restart remote workers"


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
