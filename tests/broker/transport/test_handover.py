"""The handover socket between two gateways: whole messages, descriptors, and ends that come too early."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.journal.file import Append, Delete, Operation, Put, Replace
from broker.transport import handover
from broker.transport.handover import (
    ClientConnection,
    FrameReader,
    Given,
    HandoverError,
    HandoverLine,
    HandoverListener,
    HandoverMessage,
    JournalOperation,
    Predecessor,
    Serving,
    TakeOver,
    find_predecessor,
)
from tests.broker.asgi import run

WAIT_S = 20.0
OPERATIONS: list[Operation] = [
    Put(("answer", "a"), b"head", {b"digest": b"blob"}, ended=True),
    Append(("answer", "a"), b"item"),
    Replace(("answer", "a"), None, ended=True),
    Replace(("answer", "a"), b"new head"),
    Delete(("response", "00:resp_1")),
]


def framed(*messages: HandoverMessage) -> bytes:
    encoded = map(handover._encoder.encode, messages)
    return b"".join(len(each).to_bytes(4, "big") + each for each in encoded)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_arrives_as_it_was(operation: Operation) -> None:
    [(message, _)] = FrameReader().feed(framed(JournalOperation.of(operation)), [])
    assert isinstance(message, JournalOperation)
    assert message.operation() == operation


@given(st.lists(st.integers(1, 40), max_size=20))
def test_messages_are_whole_however_they_are_cut(cuts: list[int]) -> None:
    messages = [TakeOver(version=1), Serving(), *map(JournalOperation.of, OPERATIONS), Given(kept=["a"])]
    data, reader, read = framed(*messages), FrameReader(), list[HandoverMessage]()
    for cut in [*cuts, len(data)]:
        read += [message for message, _ in reader.feed(data[:cut], [])]
        data = data[cut:]
    assert read == messages


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(HandoverError):
        list(FrameReader().feed(data, []))


class Ends:
    """Both ends of a line on the event loop, and what the second one has received."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.first, self.second = HandoverLine(ours), HandoverLine(theirs)
        self.received: list[HandoverMessage] = []
        self.connections: list[socket.socket] = []
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        self.second.start(self._take, self.ended.set)

    def _take(self, message: HandoverMessage, connection: socket.socket | None) -> None:
        self.received.append(message)
        if connection is not None:
            self.connections.append(connection)
        self._changed.set()

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not check():
                await self._changed.wait()
                self._changed.clear()

    def close(self) -> None:
        self.first.close()
        self.second.close()


def check_connected(mine: list[socket.socket], passed: list[socket.socket]) -> None:
    """Check that each socket is connected with the one that was passed on for it, and close both."""
    for number, (ours, theirs) in enumerate(zip(mine, passed, strict=True)):
        ours.sendall(b"%d" % number)
        assert theirs.recv(8) == b"%d" % number
        ours.close()
        theirs.close()


def test_connections_and_large_messages_arrive_in_order() -> None:
    async def body() -> None:
        ends = Ends()
        large = JournalOperation(kind="append", name=("answer", "a"), item=bytes(3 * 2**20))
        pairs = [socket.socketpair() for _ in range(8)]
        for _, passed in pairs:
            assert ends.first.send(large)
            assert ends.first.send(ClientConnection(), passed.fileno())
            passed.close()  # the connection goes on by its duplicate
        await ends.until(lambda: len(ends.connections) == len(pairs))
        assert ends.received == [large, ClientConnection()] * len(pairs)
        check_connected([mine for mine, _ in pairs], ends.connections)
        ends.close()

    run(body())


def test_many_connections_in_a_row_keep_their_descriptors() -> None:
    async def body() -> None:
        ends = Ends()
        pairs = [socket.socketpair() for _ in range(100)]
        for _, passed in pairs:
            assert ends.first.send(ClientConnection(), passed.fileno())
            passed.close()
        await ends.until(lambda: len(ends.received) == len(pairs))
        check_connected([mine for mine, _ in pairs], ends.connections)
        ends.close()

    run(body())


def test_what_an_end_has_sent_before_it_closed_arrives_although_it_can_be_told_nothing() -> None:
    async def body() -> None:
        ends = Ends()
        client, passed = socket.socketpair()
        assert ends.first.send(JournalOperation.of(OPERATIONS[0]))
        assert ends.first.send(ClientConnection(), passed.fileno())
        passed.close()
        ends.first.close()
        assert not ends.second.send(Serving())
        async with asyncio.timeout(WAIT_S):
            await ends.ended.wait()
        assert ends.received == [JournalOperation.of(OPERATIONS[0]), ClientConnection()]
        check_connected([client], ends.connections)
        ends.close()

    run(body())


def test_an_end_that_closes_or_talks_nonsense_is_noticed() -> None:
    async def body() -> None:
        for is_nonsense in (False, True):
            ends = Ends()
            if is_nonsense:
                ends.first._line.sendall(b"\xff\xff\xff\xff")
            else:
                ends.first.close()
            async with asyncio.timeout(WAIT_S):
                await ends.ended.wait()
            assert not ends.second.is_open
            assert not ends.second.send(Serving())
            ends.close()

    run(body())


def test_what_a_successor_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "UNSENT_BYTES_MAX", 2**20)

    async def body() -> None:
        ours, theirs = socket.socketpair()
        line = HandoverLine(ours)
        large = JournalOperation(kind="append", name=("answer", "a"), item=bytes(2**16))
        sent = 0
        while line.send(large):
            sent += 1
            assert sent < 100
        assert not line.is_open
        assert not line.send(Serving())  # nothing follows what is missing
        theirs.close()

    run(body())


def reply(line: socket.socket, *messages: HandoverMessage) -> None:
    line.recv(4096)
    line.sendall(framed(*messages))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([Given(refusal="it ends already")], "it ends already"),
        ([], "did not answer in time"),
        ([Serving()], "did not answer in time"),
    ],
)
def test_a_successor_learns_why_it_gets_nothing(messages: list[HandoverMessage], why: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answering = threading.Thread(target=reply, args=(theirs, *messages))
        answering.start()
        with pytest.raises((HandoverError, TimeoutError)) as caught:
            Predecessor(ours, 1, within_s=0.3)
        answering.join()
        assert isinstance(caught.value, TimeoutError) or why in str(caught.value)


def test_operations_that_come_before_the_reply_are_kept_in_order() -> None:
    early = [JournalOperation.of(operation) for operation in OPERATIONS]
    ours, theirs = socket.socketpair()
    with theirs:
        answering = threading.Thread(target=reply, args=(theirs, *early, Given(kept=["a"], workers=["w"])))
        answering.start()
        predecessor = Predecessor(ours, 1)
        answering.join()
        assert predecessor.early == early
        assert predecessor.given == Given(kept=["a"], workers=["w"])
        ours.close()


def test_connections_that_come_with_the_reply_are_not_lost() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        client, passed = socket.socketpair()
        theirs.sendall(framed(JournalOperation.of(OPERATIONS[0])))
        socket.send_fds(theirs, [framed(Given(), ClientConnection(), Serving())], [passed.fileno()])
        passed.close()
        line, changed = Predecessor(ours, 1).open(), asyncio.Event()
        received: list[HandoverMessage] = []
        connections: list[socket.socket] = []

        def take(message: HandoverMessage, connection: socket.socket | None) -> None:
            received.append(message)
            connections.extend([connection] if connection is not None else [])
            changed.set()

        line.start(take, lambda: None)
        await asyncio.wait_for(changed.wait(), WAIT_S)
        assert received == [ClientConnection(), Serving()]
        check_connected([client], connections)
        line.close()
        theirs.close()

    run(body())


def test_without_a_gateway_there_is_no_predecessor(tmp_path: Path) -> None:
    assert find_predecessor(tmp_path / "handover", 1) is None
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "handover"))
    left.close()  # as `kill -9` leaves it
    assert find_predecessor(tmp_path / "handover", 1) is None


def test_a_listener_replaces_the_file_of_a_dead_gateway_and_removes_its_own(tmp_path: Path) -> None:
    path = tmp_path / "handover"

    async def body() -> None:
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()
        lines: asyncio.Queue[HandoverLine] = asyncio.Queue()
        listener = HandoverListener(path, lines.put_nowait)
        assert path.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(str(path))
            line = await asyncio.wait_for(lines.get(), WAIT_S)
        with pytest.raises(FileExistsError):
            HandoverListener(path, lines.put_nowait)
        line.close()
        listener.close()
        listener.close()
        assert not path.exists()

    run(body())
