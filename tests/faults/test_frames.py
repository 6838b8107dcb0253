"""Mutated frames for both ends of the connection: a short run of `python -m tests.faults.frames`."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from protocol import wire
from protocol.messages import Heartbeat
from tests.faults import frames, mutated_peers

FRAMES = 4000


class Beating:
    """A socket on which a worker says nothing but that it lives."""

    def poll(self, timeout_ms: float) -> bool:
        return timeout_ms > 0

    def recv_multipart(self) -> list[bytes]:
        return [b"w", *wire.encode(Heartbeat(incarnation="w", running=0, waiting=0, steps=0))]


def test_a_worker_that_lives_but_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        gateway = mutated_peers.FalseGateway(context, f"ipc://{tmp_path}/line")
        gateway.close()
    monkeypatch.setattr(mutated_peers, "WAIT_MS", 20)
    monkeypatch.setattr(gateway, "_socket", Beating())
    with pytest.raises(AssertionError, match="does not send"):
        gateway.meet()


def test_a_gateway_lives_on_whatever_a_worker_says(tmp_path: Path) -> None:
    outcome = frames.at_gateway(tmp_path, FRAMES, seed=20)
    assert outcome.wrong == []
    assert outcome.answered
    # Some messages must pass the decoder and reach the later checks.
    assert outcome.heard.keys() >= {"Generate", "Cancel", "dropped as no_flight", "dropped as forged"}


def test_a_worker_lives_on_whatever_a_gateway_says(tmp_path: Path) -> None:
    outcome = frames.at_worker(tmp_path, FRAMES, seed=20)
    assert outcome.wrong == []
    assert outcome.answered == FRAMES // frames.BATCH
    # Further messages pass the decoder, whether they are refused then, or cancelled by one behind them.
    assert outcome.heard["Accepted"] + outcome.heard["Failed"] > outcome.answered
    assert outcome.heard.keys() >= {"Hello", "CacheCleared", "Finished"}
