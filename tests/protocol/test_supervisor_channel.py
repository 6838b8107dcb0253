"""Channel between supervisor and gateway: the newest line is used, and no end blocks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from protocol.channel import LINE_BYTES_MAX, ChannelReader, ChannelWriter
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


def test_message_arrives_complete(pair: Pair) -> None:
    ours, theirs = pair
    orders = DesiredModels(wanted=["a"], serving=[1, 2], idle=[3])
    ChannelWriter(ours).send(orders)
    assert ChannelReader(DesiredModels).feed(theirs.recv(4096)) == orders


def test_no_wish_is_another_thing_than_none_wanted() -> None:
    for orders in (DesiredModels(), DesiredModels(wanted=[])):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ChannelWriter(ours).send(orders)
            assert ChannelReader(DesiredModels).feed(theirs.recv(4096)) == orders


def test_the_same_is_not_said_twice(pair: Pair) -> None:
    ours, theirs = pair
    outlet = ChannelWriter(ours)
    for orders in (DesiredModels(serving=[1]), DesiredModels(serving=[1]), DesiredModels(serving=[2])):
        outlet.send(orders)
    assert theirs.recv(4096).count(b"\n") == 2


def test_of_several_lines_the_last_counts_and_pieces_are_put_together() -> None:
    inlet = ChannelReader(DesiredModels)
    assert inlet.feed(b'{"serving":[1]}\n{"serving":[2]}\n{"ser') == DesiredModels(serving=[2])
    assert inlet.feed(b'ving":[3') is None
    assert inlet.feed(b"]}\n") == DesiredModels(serving=[3])


@pytest.mark.parametrize("data", [b"x\n", b'{"serving":1}\n', b"\xff\xfe\n", b"x" * (LINE_BYTES_MAX + 1)])
def test_malformed_message_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        ChannelReader(DesiredModels).feed(data)


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


def test_write_to_a_closed_channel_is_ignored(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    ChannelWriter(ours).send(DesiredModels(serving=[1]))
