"""Ranks that come, that do not, and that have a reason; and who goes when all were there."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.sockets import write_keys
from protocol.workersettings import WorkerSettings
from tests.ports import free_port
from worker.contract import ModelError
from worker.ranks import calls
from worker.ranks.line import FollowerLine, LeaderLine
from worker.ranks.meeting import Meeting, RankAbsentError
from worker.ranks.place import Place
from worker.ranks.watch import Watch

WAIT_S = 10.0


@contextlib.contextmanager
def meeting(size: int = 2, join_s: float = WAIT_S) -> Iterator[tuple[Meeting, Place]]:
    """Of ranks that somebody else starts."""
    here = Place(0, size, "ring", f"tcp://127.0.0.1:{free_port()}")
    met = Meeting(WorkerSettings(join_timeout_s=join_s), "ring", here)
    try:
        yield met, here
    finally:
        met.line.close()


@contextlib.contextmanager
def follower(here: Place, rank: int, keys: Path | None = None) -> Iterator[FollowerLine]:
    line = FollowerLine(here.endpoint, rank, keys)
    try:
        yield line
    finally:
        line.close()


def test_all_that_come_are_called(caplog: pytest.LogCaptureFixture) -> None:
    with meeting(3) as (met, here), follower(here, 1) as one, follower(here, 2) as two:
        for rank, line in ((1, one), (2, two)):
            assert line.say(calls.Here(rank, f"mac-{rank}"), WAIT_S)
        watch = met.gather()
        met.line.call(calls.Join())
        assert one.hear() == two.hear() == calls.Join()
        for rank, line in ((1, one), (2, two)):
            assert line.say(calls.Read(rank), WAIT_S)
        met.await_read()
        watch.close()


def test_one_that_does_not_come_in_time_is_named() -> None:
    with meeting(3, join_s=0.1) as (met, here), follower(here, 1) as one:
        assert one.say(calls.Here(1, "mac-1"), WAIT_S)
        with pytest.raises(RankAbsentError, match=r"rank 2 did not come within 0.1 s"):
            met.gather()


@pytest.mark.parametrize("for_good", [True, False])
def test_one_that_refuses_says_why_and_whether_for_good(for_good: bool) -> None:
    with meeting() as (met, here), follower(here, 1) as one:
        assert one.say(calls.Here(1, "mac-1"), WAIT_S)
        assert one.say(calls.Refused(1, "there is no such folder.", for_good), WAIT_S)
        met.line.hear(WAIT_S)
        with pytest.raises(ModelError if for_good else RankAbsentError, match="rank 1: there is no such"):
            met.await_read()


def watched(line: LeaderLine) -> tuple[Watch, queue.SimpleQueue[str]]:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Watch(line.monitor, reasons.put)
    watch.start()
    return watch, reasons


def test_one_that_goes_is_noticed_and_strangers_are_not(tmp_path: Path) -> None:
    with meeting() as (met, here):
        watch, reasons = watched(met.line)
        with follower(here, 1) as one:
            assert one.say(calls.Here(1, "mac-1"), WAIT_S)
            assert met.line.hear(WAIT_S) == calls.Here(1, "mac-1")
            host, port = here.endpoint.removeprefix("tcp://").split(":")
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f"):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(said)
            with pytest.raises(queue.Empty):
                reasons.get(timeout=0.5)
        assert reasons.get(timeout=WAIT_S) == "a rank is gone"
        watch.close()


def test_what_takes_too_long_is_noticed() -> None:
    with meeting() as (met, _):
        watch, reasons = watched(met.line)
        watch.allow(0.05, "trying the model")
        assert reasons.get(timeout=WAIT_S) == "trying the model takes too long"
        watch.close()


def test_with_keys_nobody_comes_in_without_them(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    line = LeaderLine(endpoint, tmp_path / "keys")
    here = Place(0, 2, "ring", endpoint)
    try:
        with follower(here, 1) as stranger, follower(here, 1, tmp_path / "keys") as one:
            assert not stranger.say(calls.Here(1, "stranger"), 0.5)
            assert one.say(calls.Here(1, "mac-1"), WAIT_S)
            assert line.hear(WAIT_S) == calls.Here(1, "mac-1")
    finally:
        line.close()
