"""The ROUTER socket on the event loop: what comes in is heard in order, and nothing raises out of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from broker.line import patience
from broker.line.link import _MESSAGES_AT_ONCE as AT_ONCE
from broker.line.link import FLOODING, Link
from protocol import sockets, wire
from protocol.messages import Events, Goodbye, Hello, ToGateway, Welcome
from protocol.parts import Delta
from tests.broker.asgi import run

BURST = 3000

Socket = zmq.Socket[bytes]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/line"


class Workers:
    """DEALER sockets, closed with the test if not before."""

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
        """Close the connection after what was said has been sent."""
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


class Heard:
    """What the link reported, in order: messages, (as a name alone) whose connection broke, and (with the
    reason behind a colon) who was turned away."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[tuple[str, ToGateway] | str] = asyncio.Queue()

    def hear(self, sender: str, message: ToGateway) -> int:
        self._news.put_nowait((sender, message))
        return len(message.deltas) if isinstance(message, Events) else 0

    def lost(self, sender: str) -> None:
        self._news.put_nowait(sender)

    def turn_away(self, peer: str, why: str) -> None:
        self._news.put_nowait(f"{peer}: {why}")

    async def next(self) -> tuple[str, ToGateway] | str:
        return await self._news.get()

    @property
    def silent(self) -> bool:
        return self._news.empty()


@asynccontextmanager
async def listening(endpoint: str) -> AsyncIterator[tuple[Link, Heard]]:
    link, heard = Link(endpoint, None), Heard()
    link.start(heard.hear, heard.lost, heard.turn_away)
    try:
        yield link, heard
    finally:
        link.close()


def hello(name: str) -> Hello:
    return Hello(incarnation=name, version=1, model="m", pid=1)


def goodbye(name: str, number: int = 0) -> Goodbye:
    return Goodbye(incarnation=name, reason=str(number))


async def say(worker: Socket, *messages: Hello | Goodbye | Events) -> None:
    def send() -> None:
        for message in messages:
            worker.send_multipart(wire.encode(message))

    await asyncio.to_thread(send)


def test_a_burst_is_heard_whole_and_in_order(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            await say(workers.connect("w"), *(goodbye("w", number) for number in range(BURST)))
            for number in range(BURST):
                assert await heard.next() == ("w", goodbye("w", number))

    run(talk())


def test_others_get_their_turn_before_more_is_heard_than_is_read_at_once(
    endpoint: str, workers: Workers
) -> None:
    """Also where each message is answered: who answers asks for another look at the socket each time."""

    async def talk() -> None:
        heard: Counter[int] = Counter()
        turn = 0

        def hear(sender: str, message: ToGateway) -> int:
            heard[turn] += 1
            link.send(sender, Welcome(incarnation="g", version=1))
            return 0

        link = Link(endpoint, None)
        link.start(hear, lambda peer: None, lambda peer, why: None)
        try:
            worker = workers.connect("w")
            for _ in range(AT_ONCE * 6):  # from this thread: nothing is heard meanwhile
                worker.send_multipart(wire.encode(hello("w")))
            while heard.total() < AT_ONCE * 6:
                await asyncio.sleep(0)
                turn += 1
        finally:
            link.close()
        assert max(heard.values()) <= AT_ONCE

    run(talk())


def test_what_is_sent_arrives_in_order(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (link, heard):
            worker = workers.connect("w")
            await say(worker, hello("w"))
            await heard.next()
            for version in range(1000):
                assert link.send("w", Welcome(incarnation="g", version=version))
            for version in range(1000):
                frames = await asyncio.to_thread(worker.recv_multipart)
                assert wire.decode_to_worker(frames)[0] == Welcome(incarnation="g", version=version)

    run(talk())


def test_a_message_to_nobody_is_not_sent(endpoint: str) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (link, _):
            assert not link.send("nobody", Welcome(incarnation="g", version=1))
            assert link.errors.total() == 1

    run(talk())


def test_garbage_is_counted_and_what_follows_is_heard(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (link, heard):
            worker = workers.connect("w")
            for garbage in ([b""], [b"\xc1"], [b"\xff" * 100, b"media"], [b"\x91" * 5000], [b""] * 100):
                await asyncio.to_thread(worker.send_multipart, garbage)
            await say(worker, hello("w"))
            assert await heard.next() == ("w", hello("w"))
            assert link.errors["decode"] == 5

    run(talk())


def test_a_message_that_brings_its_reader_down_is_counted_and_the_next_is_heard(
    endpoint: str, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> None:
        link, heard = Link(endpoint, None), Heard()

        def hear(sender: str, message: ToGateway) -> int:
            if isinstance(message, Goodbye):
                raise KeyError("a mistake of ours")
            return heard.hear(sender, message)

        link.start(hear, heard.lost, heard.turn_away)
        try:
            await say(workers.connect("w"), goodbye("w"), goodbye("w"), hello("w"))
            assert await heard.next() == ("w", hello("w"))
        finally:
            link.close()
        assert link.errors == {"handle": 2}
        assert "a Goodbye from w could not be handled" in caplog.text

    run(talk())


def test_a_peer_whose_name_is_no_text_is_heard_under_another(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            stranger = workers.connect("placeholder")
            stranger.setsockopt(zmq.IDENTITY, b"\xff\xfe")
            stranger.connect(endpoint)
            await say(workers.connect("w"), hello("w"))
            assert await heard.next() == ("w", hello("w"))

    run(talk())


def test_last_words_are_heard_before_the_loss_which_is_told_once(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            for name in ("w1", "w2", "w3"):
                worker = workers.connect(name)
                await say(worker, *(goodbye(name, number) for number in range(500)))
                workers.die(worker)
                for number in range(500):
                    assert await heard.next() == (name, goodbye(name, number))
                assert await heard.next() == name
            assert heard.silent

    run(talk())


def test_a_worker_that_came_and_died_while_the_loop_was_busy_is_lost_too(
    endpoint: str, workers: Workers
) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (link, heard):
            worker = workers.connect("w")
            worker.send_multipart(wire.encode(hello("w")))
            workers.die(worker)
            # Nothing has been awaited yet: the link finds the end of the connection beside its first words.
            assert link._monitor.poll(20_000)
            assert await heard.next() == ("w", hello("w"))
            assert await heard.next() == "w"

    run(talk())


def test_a_worker_that_was_never_heard_is_not_lost(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            quiet, other = workers.connect("quiet"), workers.connect("w")
            assert await asyncio.to_thread(quiet.poll, 20_000, zmq.POLLOUT)
            workers.die(quiet)
            await say(other, hello("w"))
            assert await heard.next() == ("w", hello("w"))
            workers.die(other)
            assert await heard.next() == "w"

    run(talk())


def test_a_worker_that_comes_back_under_its_name_is_heard_again(endpoint: str, workers: Workers) -> None:
    async def talk() -> None:
        async with listening(endpoint) as (link, heard):
            for _ in range(5):
                worker = workers.connect("w")
                await say(worker, hello("w"))
                # The loss of the connection before may be told first, but never after its Hello.
                news = await heard.next()
                assert (await heard.next() if news == "w" else news) == ("w", hello("w"))
                assert link.send("w", Welcome(incarnation="g", version=1))
                await asyncio.to_thread(worker.recv_multipart)
                workers.die(worker)

    run(talk())


def test_a_link_that_was_never_started_closes(endpoint: str) -> None:
    Link(endpoint, None).close()


# --- floods ------------------------------------------------------------------------------------------


def test_who_floods_is_turned_away_and_others_are_heard_on(
    endpoint: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "USELESS_MESSAGES_MAX", 500)
    monkeypatch.setattr(patience, "USELESS_MESSAGES_PER_S", 0)

    async def talk() -> None:
        async with listening(endpoint) as (link, heard):
            flood, other = workers.connect("flood"), workers.connect("w")
            await say(flood, *(goodbye("flood", number) for number in range(600)))
            for number in range(501):
                assert await heard.next() == ("flood", goodbye("flood", number))
            assert await heard.next() == f"flood: {FLOODING}"
            await say(other, hello("w"))
            assert await heard.next() == ("w", hello("w"))
            assert link.send("flood", Welcome(incarnation="g", version=1))  # it can be told
            # Whoever comes back is not heard either, and is told again.
            workers.die(flood)
            assert await heard.next() == "flood"
            await say(workers.connect("flood"), hello("flood"))
            assert await heard.next() == f"flood: {FLOODING}"
            await say(other, goodbye("w"))
            assert await heard.next() == ("w", goodbye("w"))
            assert link.errors["flood"] == 100 + 1  # with the one that was too much

    run(talk())


def test_who_floods_on_is_cut_off(endpoint: str, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "USELESS_MESSAGES_MAX", 500)
    monkeypatch.setattr(patience, "USELESS_MESSAGES_PER_S", 0)  # however slowly they are read

    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            flood = workers.connect("flood")
            await say(flood, *(goodbye("flood", number) for number in range(4000)))
            while await heard.next() != f"flood: {FLOODING}":
                pass
            # What it has left to say comes on a connection of its own, perhaps before the other is missed.
            while await heard.next() not in ("flood", f"flood: {FLOODING}"):
                pass

    run(talk())


def test_a_worker_as_fast_as_can_be_is_no_flood_as_long_as_it_is_of_use(
    endpoint: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "USELESS_MESSAGES_MAX", 10)
    monkeypatch.setattr(patience, "USELESS_MESSAGES_PER_S", 0)

    async def talk() -> None:
        async with listening(endpoint) as (_, heard):
            deltas = [Delta(id=f"r{row}", sequence=0, tokens=[7], text="word ") for row in range(64)]
            step = Events(incarnation="w", deltas=deltas)
            await say(workers.connect("w"), *[step] * BURST)
            for _ in range(BURST):
                assert await heard.next() == ("w", step)

    run(talk())
