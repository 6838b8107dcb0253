"""The line between supervisor and gateway: the newest line counts, and nobody waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from protocol.orderline import LINE_BYTES_MAX, Inlet, Outlet
from protocol.orders import ModelState, Orders, Roster

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def roster(number: int) -> Roster:
    """A long one."""
    models = [ModelState(name=f"model {name}", memory_bytes=number) for name in range(200)]
    return Roster(models=models, on_demand=True, memory_budget=number)


def test_what_is_said_arrives_whole(pair: Pair) -> None:
    ours, theirs = pair
    orders = Orders(wanted=["a"], serving=[1, 2], idle=[3])
    Outlet(ours).say(orders)
    assert Inlet(Orders).feed(theirs.recv(4096)) == orders


def test_no_wish_is_another_thing_than_none_wanted() -> None:
    for orders in (Orders(), Orders(wanted=[])):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            Outlet(ours).say(orders)
            assert Inlet(Orders).feed(theirs.recv(4096)) == orders


def test_the_same_is_not_said_twice(pair: Pair) -> None:
    ours, theirs = pair
    outlet = Outlet(ours)
    for orders in (Orders(serving=[1]), Orders(serving=[1]), Orders(serving=[2])):
        outlet.say(orders)
    assert theirs.recv(4096).count(b"\n") == 2


def test_of_several_lines_the_last_counts_and_pieces_are_put_together() -> None:
    inlet = Inlet(Orders)
    assert inlet.feed(b'{"serving":[1]}\n{"serving":[2]}\n{"ser') == Orders(serving=[2])
    assert inlet.feed(b'ving":[3') is None
    assert inlet.feed(b"]}\n") == Orders(serving=[3])


@pytest.mark.parametrize("data", [b"x\n", b'{"serving":1}\n', b"\xff\xfe\n", b"x" * (LINE_BYTES_MAX + 1)])
def test_what_makes_no_sense_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Inlet(Orders).feed(data)


def test_who_does_not_read_gets_the_newest_and_nothing_is_torn(pair: Pair) -> None:
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outlet, inlet = Outlet(ours), Inlet(Roster)
    for number in range(1000):
        outlet.say(roster(number))
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


def test_nobody_at_the_other_end_is_no_error(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    Outlet(ours).say(Orders(serving=[1]))
