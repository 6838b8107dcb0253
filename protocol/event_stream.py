"""Reader of server-sent events, for the commands that read streamed answers.

A line ends at CR LF, LF or CR, as the standard says, and at no other character that Unicode counts as an end.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterable, Iterator


class EventReader:
    """Incremental parser that returns the data of each event. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._begins = True
        self._ended_in_cr = False
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of the events that `received` completes."""
        if not received:
            return
        if self._ended_in_cr:
            received = received.removeprefix(b"\n")
        self._ended_in_cr = received.endswith(b"\r")
        lines = (self._line + received).splitlines(keepends=True)  # of bytes: at CR LF, LF and CR only
        self._line = lines.pop() if lines and not lines[-1].endswith((b"\r", b"\n")) else b""
        for line in lines:
            yield from self._take(line.rstrip(b"\r\n"))

    def end(self) -> Iterator[bytes]:
        """Yield the data of a last event without the empty line behind it."""
        if self._line:
            yield from self._take(self._line)
        yield from self._take(b"")

    def _take(self, line: bytes) -> Iterator[bytes]:
        if self._begins:
            self._begins, line = False, line.removeprefix(BOM_UTF8)
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif not line:
            data, self._data = b"\n".join(self._data), []
            if data:
                yield data


def events(received: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event of a stream."""
    reader = EventReader()
    for piece in received:
        yield from reader.feed(piece)
    yield from reader.end()


async def events_async(received: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream."""
    reader = EventReader()
    async for piece in received:
        for data in reader.feed(piece):
            yield data
    for data in reader.end():
        yield data
