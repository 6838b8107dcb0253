"""Handover socket: a gateway's connection to the one that replaces it, on this machine.

The successor connects, and sends `TakeOver`. The gateway replies with `Given`, after which it has neither
the endpoint of the workers nor the journal. From then on it sends `JournalOperation`s of the answers that it
still serves, and its clients' connections as descriptors, until it ends and the socket closes.

A frame is a length of four bytes and a message in MessagePack. The descriptor of a `ClientConnection` is
attached to its frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from broker.journal.file import Append, Delete, Operation, Put, Replace
from protocol import sockets
from protocol.secure_files import create_private

log = logging.getLogger(__name__)

HANDOVER_S_MAX = 20.0
"""Time in seconds until a gateway has handed over: it waits for its batches and its journal."""
FRAME_BYTES_MAX = 128 * 2**20
UNSENT_BYTES_MAX = 256 * 2**20
"""Bytes for a successor that does not read, beyond which the line is closed: it may lack the last operations,
but none between two others."""
_READ_BYTES = 2**20
_DESCRIPTORS_AT_ONCE = 16
_LENGTH_BYTES = 4


class TakeOver(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a successor. `version`: of the protocol with the workers."""

    version: int


class Given(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Reply to `TakeOver`. `kept`: ids of the answers in the journal that the gateway still serves.
    `endpoint`: where workers reach it from now on. `workers`: incarnations of the workers that serve.
    `refusal`: why it does not hand over; empty: it has."""

    kept: list[str] = []
    endpoint: str = ""
    workers: list[str] = []
    refusal: str = ""


class JournalOperation(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An operation on the journal; the fields are those of its class in `broker.journal.file`."""

    kind: Literal["put", "append", "replace", "delete"]
    name: tuple[str, str]
    head: bytes | None = None
    item: bytes = b""
    blobs: dict[bytes, bytes] = {}
    ended: bool = False

    @classmethod
    def of(cls, operation: Operation) -> JournalOperation:
        match operation:
            case Put(name, head, blobs, ended):
                return cls(kind="put", name=name, head=head, blobs=dict(blobs), ended=ended)
            case Append(name, item):
                return cls(kind="append", name=name, item=item)
            case Replace(name, head, ended):
                return cls(kind="replace", name=name, head=head, ended=ended)
            case Delete(name):
                return cls(kind="delete", name=name)

    def operation(self) -> Operation:
        match self.kind:
            case "put":
                return Put(self.name, self.head or b"", self.blobs, self.ended)
            case "append":
                return Append(self.name, self.item)
            case "replace":
                return Replace(self.name, self.head, self.ended)
            case "delete":
                return Delete(self.name)


class ClientConnection(Struct, frozen=True, tag=True):
    """A client's connection, between two requests."""


class Serving(Struct, frozen=True, tag=True):
    """The successor serves clients."""


HandoverMessage = TakeOver | Given | JournalOperation | ClientConnection | Serving

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[HandoverMessage] = msgspec.msgpack.Decoder(HandoverMessage)

OnMessage = Callable[[HandoverMessage, socket.socket | None], None]
"""(message, the client's connection) -> nothing."""


class HandoverError(Exception):
    """The other gateway has not handed over; the message says why."""


class FrameReader:
    """Decoder of frames, with the descriptors that came beside them."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(
        self, data: bytes, descriptors: list[int]
    ) -> Iterator[tuple[HandoverMessage, socket.socket | None]]:
        """Yield the messages that `data` completes. Raises `HandoverError` for what is none."""
        self._data += data
        self._descriptors += descriptors
        while len(self._data) >= _LENGTH_BYTES:
            length = int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if length > FRAME_BYTES_MAX:
                raise HandoverError(f"a frame of {length} bytes")
            if len(self._data) < _LENGTH_BYTES + length:
                return
            frame = bytes(self._data[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._data[: _LENGTH_BYTES + length]
            try:
                message = _decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise HandoverError(f"an invalid message: {error}") from error
            with_socket = isinstance(message, ClientConnection) and self._descriptors
            yield message, socket.socket(fileno=self._descriptors.popleft()) if with_socket else None

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


class HandoverLine:
    """One end of a connection between two gateways, on the event loop."""

    def __init__(self, line: socket.socket, reader: FrameReader | None = None) -> None:
        """`reader`: has what was read before."""
        self._line = line
        self._line.setblocking(False)
        self._reader = reader or FrameReader()
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._unsent_bytes = 0
        self._on_message: OnMessage = lambda message, connection: None
        self._on_end: Callable[[], None] = lambda: None
        self._is_reached = True
        """Whether the other end may still read."""
        self.is_open = True

    def start(self, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        """Read from now on. `on_end`: called once, when the other end has closed, or fails."""
        self._on_message, self._on_end = on_message, on_end
        asyncio.get_running_loop().add_reader(self._line, self._read)
        self._take(b"", [])

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._line, _READ_BYTES, _DESCRIPTORS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not self._take(data, descriptors) or not data:
            self._end()

    def _take(self, data: bytes, descriptors: list[int]) -> bool:
        """Handle the messages that `data` completes; return False if it is none."""
        try:
            for message, connection in self._reader.feed(data, descriptors):
                self._on_message(message, connection)
        except HandoverError as error:
            log.error("the other gateway has sent %s", error)
            return False
        return True

    def send(self, message: HandoverMessage, connection: int | None = None) -> bool:
        """Send a message, with the descriptor of a client's connection if there is one; return False if the
        other end is gone or does not read."""
        encoded = _encoder.encode(message)
        if self._unsent_bytes + len(encoded) > UNSENT_BYTES_MAX:
            self._end()
        if not (self.is_open and self._is_reached):
            return False
        try:
            descriptor = None if connection is None else os.dup(connection)
        except OSError:  # too many open files
            return False
        self._unsent.append((len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded, descriptor))
        self._unsent_bytes += _LENGTH_BYTES + len(encoded)
        self._write()
        return self._is_reached

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                data, descriptor = self._unsent[0]
                sent = socket.send_fds(self._line, [data], [] if descriptor is None else [descriptor])
                self._unsent.popleft()
                if descriptor is not None:
                    os.close(descriptor)
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent.appendleft((data[sent:], None))
            loop.remove_writer(self._line)
        except BlockingIOError:
            loop.add_writer(self._line, self._write)
        except OSError:
            # What the other end sent before it closed, as the connections of clients, is still to be read.
            self._is_reached = False
            loop.remove_writer(self._line)
            self._drop_unsent()

    def _drop_unsent(self) -> None:
        for _, descriptor in self._unsent:
            if descriptor is not None:
                os.close(descriptor)
        self._unsent.clear()
        self._unsent_bytes = 0

    def _end(self) -> None:
        if self.is_open:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Close this end. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._line)
        loop.remove_writer(self._line)
        self._drop_unsent()
        self._reader.close()
        self._line.close()


class HandoverListener:
    """Listener for a successor. It accepts one, and is closed then."""

    def __init__(self, path: Path, on_successor: Callable[[HandoverLine], None]) -> None:
        """Listen, on the running loop. Raises `OSError`."""
        self._path, self._on_successor = path, on_successor
        if not sockets.remove_stale(path):
            raise FileExistsError(f"another gateway is listening at {path}")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            with create_private():
                self._listener.bind(str(path))
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            line, _ = self._listener.accept()
            self._on_successor(HandoverLine(line))

    def close(self) -> None:
        """Stop to listen, and remove the file. Idempotent."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._path.unlink(missing_ok=True)


class Predecessor:
    """A gateway that has handed over to this one. `given`: what it said; `line`: for the event loop; `early`:
    the operations that came before."""

    def __init__(self, line: socket.socket, version: int, within_s: float = HANDOVER_S_MAX) -> None:
        """Ask for the handover, and wait for it. Raises `HandoverError` or `OSError`."""
        self._line, self._reader = line, FrameReader()
        self.early: list[HandoverMessage] = []
        message = _encoder.encode(TakeOver(version=version))
        line.settimeout(within_s)
        line.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
        self.given = self._receive_given(time.monotonic() + within_s)
        if self.given.refusal:
            raise HandoverError(self.given.refusal)

    def _receive_given(self, until: float) -> Given:
        while (left_s := until - time.monotonic()) > 0:
            self._line.settimeout(left_s)
            data, descriptors, _, _ = socket.recv_fds(self._line, _READ_BYTES, _DESCRIPTORS_AT_ONCE)
            for message, _ in self._reader.feed(data, descriptors):
                if isinstance(message, Given):
                    return message  # what follows, connections of clients too, stays in the reader
                self.early.append(message)
            if not data:
                raise HandoverError("it ended meanwhile")
        raise HandoverError("it did not answer in time")

    def open(self) -> HandoverLine:
        """Return its connection, on the running loop."""
        return HandoverLine(self._line, self._reader)


def find_predecessor(path: Path, version: int) -> Predecessor | None:
    """Return the gateway that hands over at `path`; None: there is none. Raises `HandoverError`."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(path))
    except OSError:
        line.close()
        return None
    try:
        return Predecessor(line, version)
    except (HandoverError, OSError) as error:
        line.close()
        raise HandoverError(f"the gateway that is to be replaced has not handed over: {error}") from error
