"""Channels of the supervisor: to the gateway the newest line is used; to a worker; and no end blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol import channel
from protocol.channel import LINE_BYTES_MAX, ChannelReader, ChannelWriter, SpawnChannel
from protocol.settings.worker import WorkerSettings
from protocol.supervisor_messages import DesiredModels, ModelState, ModelStates

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def roster(number: int) -> ModelStates:
    """Return a long message."""
    models = [ModelState(name=f"model {name}", memory_bytes=number) for name in range(200)]
    return ModelStates(models=models, on_demand=True, memory_budget=number)


def test_messages_arrive_as_they_were_sent_and_none_twice(pair: Pair) -> None:
    ours, theirs = pair
    outlet, inlet = ChannelWriter(ours), ChannelReader(DesiredModels)
    whole = DesiredModels(wanted=["a"], serving=[1, 2], idle=[3])
    # No wish is another thing than none wanted.
    for orders in (whole, DesiredModels(), DesiredModels(wanted=[])):
        outlet.send(orders)
        outlet.send(orders)
        data = theirs.recv(4096)
        assert data.count(b"\n") == 1
        assert inlet.feed(data) == orders


def test_of_several_lines_the_last_counts_and_pieces_are_put_together() -> None:
    inlet = ChannelReader(DesiredModels)
    assert inlet.feed(b'{"serving":[1]}\n{"serving":[2]}\n{"ser') == DesiredModels(serving=[2])
    assert inlet.feed(b'ving":[3') is None
    assert inlet.feed(b"]}\n") == DesiredModels(serving=[3])


def test_malformed_message_is_an_error_and_a_closed_channel_is_none(pair: Pair) -> None:
    for data in (b'{"serving":1}\n', b"\xff\xfe\n", b"x" * (LINE_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match=r"."):
            ChannelReader(DesiredModels).feed(data)
    ours, theirs = pair
    theirs.close()
    ChannelWriter(ours).send(DesiredModels(serving=[1]))


def test_slow_reader_gets_the_latest_message_and_no_partial_ones(pair: Pair) -> None:
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outlet, inlet = ChannelWriter(ours), ChannelReader(ModelStates)
    for number in range(1000):
        outlet.send(roster(number))
    heard = 0
    last = None
    theirs.setblocking(False)
    while last != roster(999):
        try:
            data = theirs.recv(4096)
        except BlockingIOError:
            outlet.flush()
            continue
        if (said := inlet.feed(data)) is not None:
            heard, last = heard + 1, said
    assert heard < 1000


def test_what_is_not_of_a_channel_is_refused_or_none() -> None:
    assert SpawnChannel.find({}) is None
    assert SpawnChannel.find({channel.SPAWN_FD: "x"}) is None
    words = [channel.decode_word(line) for line in (b"there", b"loaded", b"", b"There", b"\xff")]
    assert words == ["there", "loaded", None, None, None]


def test_spawn_channel_is_claimed_once_and_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    environ = {channel.SPAWN_FD: str(theirs.detach()), "OTHER": "1"}
    with ours:
        os.set_inheritable(int(environ[channel.SPAWN_FD]), True)
        line = SpawnChannel.find(environ)
        assert line is not None
        assert environ == {"OTHER": "1"}
        line.send("there")
        assert ours.recv(100) == b"there\n"
        line.hand_on(environ)
        assert not os.get_inheritable(int(environ[channel.SPAWN_FD]))
        again = SpawnChannel.find(environ)
        assert again is not None
        again.send("taken")
        again.close()
        assert ours.recv(100) == b"taken\n"
        assert ours.recv(100) == b""


def test_settings_are_the_first_line_in_whatever_pieces_and_the_rest_is_left(pair: Pair) -> None:
    ours, theirs = pair
    sent = WorkerSettings(model="m\n", prefix_cache_dir=Path("/x"), adapters=("a=/b",))
    data = channel.encode_settings(sent)
    with ThreadPoolExecutor(1) as reader:
        line = SpawnChannel(theirs.dup())
        read = reader.submit(line.read_settings)
        for piece in (data[:3], data[3:-1], data[-1:] + b"next\n"):
            ours.sendall(piece)
        assert read.result() == data
        assert line.receive() == b"next\n"
        line.close()


def test_waiting_spare_gets_eof_when_the_supervisor_exits() -> None:
    ours, theirs = socket.socketpair()
    line = SpawnChannel(theirs)
    ours.close()
    with pytest.raises(EOFError):
        line.read_settings()
    line.send("there")  # the other end is closed, which is not an error
    line.close()
