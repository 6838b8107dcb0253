"""Bounded writes to a descriptor whose reader does not read."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator

import pytest

from protocol.common.logs import BoundedWriter

WAIT_S = 0.01


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(select.PIPE_BUF)):
            pass
    os.set_blocking(writer, True)


def drain(reader: int) -> bytes:
    found = b""
    while select.select((reader,), (), (), 0)[0]:
        found += os.read(reader, 2**16)
    return found


def test_a_write_that_nobody_reads_ends_and_is_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    bounded = BoundedWriter(writer, WAIT_S)
    data = b"".join(b"line %d %s\n" % (number, b"x" * 99) for number in range(200))
    assert bounded.write(data)
    assert drain(reader) == data
    fill(writer)
    assert not bounded.write(b"lost\n")
    assert not bounded.write(b"lost, too\n")
    assert bounded.take_dropped() == 0
    drain(reader)
    assert bounded.write(b"told\n")
    assert (bounded.take_dropped(), bounded.take_dropped()) == (len(b"lost\nlost, too\n"), 0)
    assert drain(reader) == b"told\n"


def test_only_the_first_write_waits_for_a_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    ask = select.select

    def asked(
        reads: tuple[int, ...], writes: tuple[int, ...], others: tuple[int, ...], wait_s: float
    ) -> object:
        waited.append(wait_s)
        return ask(reads, writes, others, wait_s)

    bounded = BoundedWriter(pipe[1], WAIT_S)
    fill(pipe[1])
    monkeypatch.setattr(select, "select", asked)
    for _ in range(3):
        bounded.write(b"lost\n")
    assert 0 < waited[0] <= WAIT_S
    assert waited[1:] == [0.0, 0.0]


def test_a_write_without_a_reader_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        BoundedWriter(writer, WAIT_S).write(b"nobody\n")
    os.close(writer)
