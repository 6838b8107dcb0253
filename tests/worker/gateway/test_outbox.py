"""Messages from the model thread to the I/O thread: in order, and without lost wakeups."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from protocol.messages import Goodbye, Message
from worker.gateway.outbox import Outbox

WAIT_S = 20.0


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


def word(number: int) -> Message:
    return Goodbye(incarnation="w", reason=str(number))


def readable(outbox: Outbox, within_s: float = 0.0) -> bool:
    return bool(select.select([outbox.fileno()], [], [], within_s)[0])


def test_messages_come_out_in_order_and_it_is_readable_until_the_last_is_taken(outbox: Outbox) -> None:
    assert not readable(outbox)
    for number in range(5):
        outbox.put(word(number))
    assert readable(outbox)
    assert outbox.take(2) == [word(0), word(1)]
    assert readable(outbox)
    assert outbox.depth() == 3
    assert outbox.take(99) == [word(2), word(3), word(4)]
    assert not readable(outbox)
    assert (outbox.take(99), outbox.depth()) == ([], 0)
    outbox.wake()  # without a message
    assert readable(outbox)
    assert outbox.take(99) == []
    assert not readable(outbox)


def test_a_flood_that_nobody_takes_blocks_nobody_and_loses_nothing(outbox: Outbox) -> None:
    # Far more than the wakeup pipe can hold.
    flood = 20_000
    for number in range(flood):
        outbox.put(word(number))
    assert outbox.depth() == flood
    taken: list[Message] = []
    while readable(outbox):
        taken += outbox.take(256)
    assert taken == [word(number) for number in range(flood)]


def test_a_reader_that_waits_for_it_gets_all_that_threads_put(outbox: Outbox) -> None:
    each, threads = 2000, 3

    def put(first: int) -> None:
        for number in range(first, first + each):
            outbox.put(word(number))

    writers = [threading.Thread(target=put, args=(n * each,)) for n in range(threads)]
    for writer in writers:
        writer.start()
    taken: list[int] = []
    while len(taken) < each * threads:
        assert readable(outbox, WAIT_S), f"no message after {len(taken)}"
        taken += [int(message.reason) for message in outbox.take(64) if isinstance(message, Goodbye)]
    for writer in writers:
        writer.join(WAIT_S)
    assert sorted(taken) == list(range(each * threads))
    for n in range(threads):
        own = [number for number in taken if number // each == n]
        assert own == sorted(own)
