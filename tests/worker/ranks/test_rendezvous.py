"""Rendezvous of ranks: present, missing, or failing with a reason; and the loss of a rank afterwards."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from protocol.settings.worker import WorkerSettings
from protocol.sockets import Curve, EndpointError, write_keys
from tests.ports import free_port
from worker.interfaces import ModelError
from worker.ranks import line as watch_module
from worker.ranks import rank_info, rpc
from worker.ranks import rendezvous as meeting_module
from worker.ranks.line import FollowerConnections, FollowerLine, LeaderConnection, LeaderLine, PeerMonitor
from worker.ranks.rank_info import RankInfo
from worker.ranks.rendezvous import RankAbsentError, Rendezvous

WAIT_S = 10.0


@contextlib.contextmanager
def meeting(size: int = 2, join_s: float = WAIT_S) -> Iterator[tuple[Rendezvous, RankInfo]]:
    """A rendezvous of ranks that something else starts."""
    with tempfile.TemporaryDirectory() as folder:
        here = RankInfo(0, size, "ring", f"ipc://{folder}/line")
        met = Rendezvous(WorkerSettings(join_timeout_s=join_s), "ring", here)
        try:
            yield met, here
        finally:
            met.line.close()


@contextlib.contextmanager
def follower(here: RankInfo, rank: int, keys: Curve | None = None) -> Iterator[FollowerLine]:
    line = FollowerLine(here.endpoint, rank, keys)
    try:
        yield line
    finally:
        line.close()


def test_all_that_come_are_called() -> None:
    with meeting(3) as (met, here), follower(here, 1) as one, follower(here, 2) as two:
        for rank, line in ((1, one), (2, two)):
            assert line.send(rpc.RankUp(rank, f"mac-{rank}"), WAIT_S)
        watch = met.gather()
        met.line.call(rpc.Join())
        assert one.receive() == two.receive() == rpc.Join()
        for rank, line in ((1, one), (2, two)):
            assert line.send(rpc.WeightsLoaded(rank), WAIT_S)
        met.await_read()
        watch.close()


def test_rank_that_joins_or_loads_weights_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "READ_S_MAX", 0.1)
    with meeting(3, join_s=0.1) as (met, here), follower(here, 1) as one:
        assert one.send(rpc.RankUp(1, "mac-1"), WAIT_S)
        with pytest.raises(RankAbsentError, match=r"rank 2 did not connect within 0.1 s"):
            met.gather()
        assert one.send(rpc.WeightsLoaded(1), WAIT_S)
        with pytest.raises(RankAbsentError, match=r"rank 2 did not read the model within 0.1 s"):
            met.await_read()


@pytest.mark.parametrize("for_good", [True, False])
def test_refusing_rank_reports_the_reason_and_whether_it_is_permanent(for_good: bool) -> None:
    with meeting() as (met, here), follower(here, 1) as one:
        assert one.send(rpc.RankUp(1, "mac-1"), WAIT_S)
        assert one.send(rpc.Refused(1, "there is no such folder.", for_good), WAIT_S)
        met.line.receive(WAIT_S)
        with pytest.raises(ModelError if for_good else RankAbsentError, match="rank 1: there is no such"):
            met.await_read()


def watched(line: LeaderLine) -> tuple[PeerMonitor, queue.SimpleQueue[str]]:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = PeerMonitor(line.monitor, line.connections, reasons.put)
    watch.start()
    return watch, reasons


def test_lost_rank_is_detected() -> None:
    with meeting() as (met, here):
        with follower(here, 1) as one:
            assert one.send(rpc.RankUp(1, "mac-1"), WAIT_S)
            assert met.line.receive(WAIT_S) == rpc.RankUp(1, "mac-1")
            watch, reasons = watched(met.line)
            with pytest.raises(queue.Empty):
                reasons.get(timeout=0.5)
        assert reasons.get(timeout=WAIT_S) == "the connection to a rank is lost"
        watch.close()


ACCEPTED, DISCONNECTED = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        ([(ACCEPTED, 7)], [(DISCONNECTED, 7)], True),
        ([(ACCEPTED, 7), (DISCONNECTED, 7)], [], True),
        ([(ACCEPTED, 7), (DISCONNECTED, 7), (ACCEPTED, 7)], [], False),
        ([(ACCEPTED, 7)], [(ACCEPTED, 8), (DISCONNECTED, 8), (DISCONNECTED, 9)], False),
    ],
    ids=["gone", "gone before it was admitted", "after a stranger", "beside strangers"],
)
def test_connection_of_a_follower_is_told_from_those_of_strangers(
    before: list[tuple[int, int]], after: list[tuple[int, int]], is_lost: bool
) -> None:
    connections = FollowerConnections()
    for event in before:
        connections.on_event(*event)
    connections.admit(7)
    for event in after:
        connections.on_event(*event)
    assert connections.is_lost == is_lost


def test_connection_to_the_leader_is_lost_only_once_it_was_made() -> None:
    connection = LeaderConnection()
    connection.on_event(DISCONNECTED, 7)
    assert not connection.is_lost
    connection.on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
    connection.on_event(DISCONNECTED, 7)
    assert connection.is_lost


class Knocked:
    """A stand-in for a socket monitor: a stranger connects and leaves over and over."""

    def poll(self, wait_ms: int) -> bool:
        return True


def test_strangers_without_end_do_not_hide_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turned_away = {"event": DISCONNECTED, "value": 7}
    monkeypatch.setattr(watch_module, "recv_monitor_message", lambda monitor: turned_away)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = PeerMonitor(cast(Any, Knocked()), FollowerConnections(), reasons.put)
    watch.allow(0.05, "trying the model")
    watch.start()
    try:
        assert reasons.get(timeout=WAIT_S) == "trying the model takes too long"
    finally:
        watch.close()


def test_a_watch_that_ends_the_process_just_now_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_CLOSE_S_MAX", 0.05)
    called, over, ended = threading.Event(), threading.Event(), threading.Event()

    def lost(reason: str) -> None:
        called.set()
        over.wait(WAIT_S)
        ended.set()

    with meeting() as (met, _):
        watch = PeerMonitor(met.line.monitor, met.line.connections, lost)
        watch.allow(0.0, "trying the model")
        watch.start()
        assert called.wait(WAIT_S)
        watch.close()
        assert not ended.is_set()
        over.set()
        assert ended.wait(WAIT_S)


def test_a_word_for_a_first_rank_that_has_just_gone_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        """A socket that was writable a moment ago."""

        def poll(self, wait_ms: int, events: int) -> bool:
            return True

        def send(self, frame: bytes, flags: int = 0) -> None:
            assert flags & zmq.NOBLOCK, "a blocking send would wait for another first rank"
            raise zmq.Again

    with meeting() as (_, here), follower(here, 1) as one, monkeypatch.context() as patched:
        patched.setattr(one, "_socket", Gone())
        assert not one.send(rpc.RankUp(1, "mac-1"), WAIT_S)


def test_ranks_that_are_started_by_hand_use_the_configured_keys_over_tcp(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    here = RankInfo(0, 2, "ring", endpoint)
    with pytest.raises(ModelError, match="requires CURVE keys"):
        Rendezvous(WorkerSettings(), "ring", here)
    met = Rendezvous(WorkerSettings(curve_keys=tmp_path / "keys"), "ring", here)
    try:
        with follower(here, 1, Curve.load(tmp_path / "keys", "worker")) as one:
            assert one.send(rpc.RankUp(1, "mac-1"), WAIT_S)
            assert met.line.receive(WAIT_S) == rpc.RankUp(1, "mac-1")
    finally:
        met.line.close()


def test_followers_get_their_keys_over_a_pipe() -> None:
    _, keys = Curve.new_pair()
    reader, writer = os.pipe()
    with open(reader, "rb", closefd=True), open(writer, "wb", buffering=0) as theirs:
        theirs.write(rank_info.encode_keys(keys)[:50])
        threading.Timer(0.05, theirs.write, [rank_info.encode_keys(keys)[50:]]).start()
        assert rank_info.read_keys(reader, WAIT_S) == keys


@pytest.mark.parametrize("said", [b"", b'["a"]\n', b"x" * 5000])
def test_a_follower_without_keys_does_not_wait_for_ever(said: bytes) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", closefd=True):
        with open(writer, "wb", buffering=0) as theirs:
            with pytest.raises(EndpointError, match=r"rank 0 has sent no keys within 0\.05 s"):
                rank_info.read_keys(reader, 0.05)
            theirs.write(said)
        with pytest.raises(EndpointError, match="rank 0 has sent no keys"):
            rank_info.read_keys(reader, WAIT_S)
