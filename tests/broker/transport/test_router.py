"""ROUTER socket on the event loop: messages arrive in order, and no exception escapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from broker.transport.router import _MESSAGES_AT_ONCE as AT_ONCE
from broker.transport.router import RouterLink
from protocol import sockets, wire
from protocol.messages import Goodbye, Hello, ToGateway, Welcome

BURST = 1000

Socket = zmq.Socket[bytes]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/line"


class Workers:
    """DEALER sockets, closed at the end of the test at the latest."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self._endpoint = endpoint
        self._open: list[Socket] = []

    def connect(self, name: str) -> Socket:
        socket = sockets.connect_dealer(self.context, self._endpoint, name, None)
        socket.sndtimeo = socket.rcvtimeo = 20_000
        self._open.append(socket)
        return socket

    def die(self, socket: Socket) -> None:
        """Close the connection after its pending messages are sent."""
        monitor = socket.get_monitor_socket()
        socket.disable_monitor()
        monitor.close(0)
        socket.close(linger=20_000)
        self._open.remove(socket)

    def close(self) -> None:
        for socket in list(self._open):
            self.die(socket)
        self.context.term()


@pytest.fixture
def workers(endpoint: str) -> Iterator[Workers]:
    workers = Workers(endpoint)
    yield workers
    workers.close()


class LinkEvents:
    """Reports of the link, in order.

    A message is a pair with its sender, a lost connection the peer's name.
    """

    def __init__(self) -> None:
        self._news: asyncio.Queue[tuple[str, ToGateway] | str] = asyncio.Queue()

    def on_message(self, sender: str, message: ToGateway) -> None:
        self._news.put_nowait((sender, message))

    def lost(self, sender: str) -> None:
        self._news.put_nowait(sender)

    async def next(self) -> tuple[str, ToGateway] | str:
        return await self._news.get()

    @property
    def silent(self) -> bool:
        return self._news.empty()


@asynccontextmanager
async def listening(
    endpoint: str, on_message: Callable[[str, ToGateway], None] | None = None, keys: Path | None = None
) -> AsyncIterator[tuple[RouterLink, LinkEvents]]:
    """Yield a link, and its reports unless `on_message` takes the messages."""
    link, touch = RouterLink(endpoint, keys), LinkEvents()
    link.start(on_message or touch.on_message, touch.lost)
    try:
        yield link, touch
    finally:
        link.close()


def hello(name: str) -> Hello:
    return Hello(incarnation=name, version=1, model="m", pid=1)


def goodbye(name: str, number: int = 0) -> Goodbye:
    return Goodbye(incarnation=name, reason=str(number))


async def say(worker: Socket, *messages: Hello | Goodbye) -> None:
    def send() -> None:
        for message in messages:
            worker.send_multipart(wire.encode(message))

    await asyncio.to_thread(send)


async def test_bursts_are_heard_whole_and_in_order_both_ways(endpoint: str, workers: Workers) -> None:
    RouterLink(endpoint, None).close()  # it was never started

    async with listening(endpoint) as (link, touch):
        worker = workers.connect("w")
        await say(worker, *(goodbye("w", number) for number in range(BURST)))
        for number in range(BURST):
            assert await touch.next() == ("w", goodbye("w", number))
            assert link.send("w", Welcome(incarnation="g", version=number))
        for number in range(BURST):
            frames = await asyncio.to_thread(worker.recv_multipart)
            assert wire.decode_to_worker(frames)[0] == Welcome(incarnation="g", version=number)
        assert not link.send("nobody", Welcome(incarnation="g", version=1))
        assert link.errors.total() == 1


async def test_others_get_their_turn_before_more_is_heard_than_is_read_at_once(
    endpoint: str, workers: Workers
) -> None:
    """This holds also if each message is answered, which schedules another read of the socket."""

    touch: Counter[int] = Counter()
    turn = 0

    def on_message(sender: str, message: ToGateway) -> None:
        touch[turn] += 1
        link.send(sender, Welcome(incarnation="g", version=1))

    async with listening(endpoint, on_message) as (link, _):
        worker = workers.connect("w")
        for _ in range(AT_ONCE * 6):  # sent from this thread, so nothing is received meanwhile
            worker.send_multipart(wire.encode(hello("w")))
        while touch.total() < AT_ONCE * 6:
            await asyncio.sleep(0)
            turn += 1
    assert max(touch.values()) <= AT_ONCE


async def test_garbage_is_counted_and_what_follows_is_heard(endpoint: str, workers: Workers) -> None:
    async with listening(endpoint) as (link, touch):
        worker = workers.connect("w")
        for garbage in ([b""], [b"\xc1"], [b"\xff" * 100, b"media"], [b"\x91" * 5000], [b""] * 100):
            await asyncio.to_thread(worker.send_multipart, garbage)
        stranger = workers.connect("placeholder")
        stranger.setsockopt(zmq.IDENTITY, b"\xff\xfe")  # a name that is no text
        stranger.connect(endpoint)
        await say(worker, hello("w"))
        assert await touch.next() == ("w", hello("w"))
        assert link.errors["decode"] == 5


async def test_a_message_that_brings_its_reader_down_is_counted_and_the_next_is_heard(
    endpoint: str, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def on_message(sender: str, message: ToGateway) -> None:
        if isinstance(message, Goodbye):
            raise KeyError("a mistake of ours")
        touch.on_message(sender, message)

    async with listening(endpoint, on_message) as (link, touch):
        await say(workers.connect("w"), goodbye("w"), goodbye("w"), hello("w"))
        assert await touch.next() == ("w", hello("w"))
    assert link.errors == {"handle": 2}
    assert "failed to handle a Goodbye from w" in caplog.text


async def test_last_words_are_heard_before_a_loss_which_is_told_once(endpoint: str, workers: Workers) -> None:
    async with listening(endpoint) as (link, touch):
        for _ in range(3):  # under one name
            worker = workers.connect("w")
            await say(worker, *(goodbye("w", number) for number in range(500)))
            for number in range(500):
                assert await touch.next() == ("w", goodbye("w", number))
            assert link.send("w", Welcome(incarnation="g", version=1))
            await asyncio.to_thread(worker.recv_multipart)
            await say(worker, goodbye("w", 500))
            workers.die(worker)
            assert await touch.next() == ("w", goodbye("w", 500))
            assert await touch.next() == "w"
        assert touch.silent


async def test_a_worker_that_was_never_heard_is_not_lost_and_one_that_was_is_however_briefly(
    endpoint: str, workers: Workers
) -> None:
    async with listening(endpoint) as (link, touch):
        quiet, other = workers.connect("quiet"), workers.connect("other")
        for worker in (quiet, other):
            assert await asyncio.to_thread(worker.poll, 20_000, zmq.POLLOUT)
        workers.die(quiet)
        await say(other, hello("other"))
        assert await touch.next() == ("other", hello("other"))
        assert touch.silent
        brief = workers.connect("w")
        brief.send_multipart(wire.encode(hello("w")))
        workers.die(brief)
        # Nothing was awaited meanwhile: the link finds the first message and the closed connection together.
        assert link._monitor.poll(20_000)
        assert await touch.next() == ("w", hello("w"))
        assert await touch.next() == "w"
