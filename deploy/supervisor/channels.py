"""Supervisor's ends of the channels to its gateway and to worker processes (`protocol.channel`)."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from protocol.channel import (
    READ_BYTES,
    SETTINGS_BYTES_MAX,
    Channel,
    ChannelReader,
    ChannelWriter,
    decode_word,
    encode_settings,
)
from protocol.supervisor_messages import DesiredModels, ModelStates, Word

log = logging.getLogger(__name__)

_CLOSE_S_MAX = 5.0

T = TypeVar("T")


class ChildChannel(Channel, ABC, Generic[T]):
    """Channel to a child, whose messages are read on a separate thread."""

    def __init__(self, child: str) -> None:
        """`child`: the kind of process, for the log. Raises `OSError`."""
        line, self.theirs = socket.socketpair()
        """The end that the child inherits."""
        super().__init__(line)
        for end, buffer in ((line, socket.SO_SNDBUF), (self.theirs, socket.SO_RCVBUF)):
            end.setsockopt(socket.SOL_SOCKET, buffer, SETTINGS_BYTES_MAX)
        self._child = child
        self._thread: threading.Thread | None = None

    @abstractmethod
    def decode(self, data: bytes) -> Sequence[T]:
        """Return the messages that `data` completes. Raises `ValueError`."""

    def send_settings(self, settings: Struct) -> None:
        """Send the settings of the process, before anything else. Raises `OSError`."""
        data = encode_settings(settings)
        if self._line.send(data, socket.MSG_DONTWAIT) != len(data):
            raise OSError(errno.EMSGSIZE, f"the settings are too long: {len(data)} bytes")

    def listen(self, on_message: Callable[[T], None]) -> None:
        """Start reading, until the child ends or the channel is closed. Called once. The end of the child is
        noticed once `theirs` is closed here. Raises `RuntimeError` if there can be no more threads."""
        name = f"channel-{self._child}"
        thread = threading.Thread(target=self._read, args=(on_message,), name=name, daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        self.theirs.close()
        with contextlib.suppress(OSError):  # macOS: the other end is closed
            self._line.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)
        super().close()

    def _read(self, on_message: Callable[[T], None]) -> None:
        while data := self.receive():
            try:
                messages = self.decode(data)
            except ValueError as error:
                log.error("invalid message from the %s: %s", self._child, error)
                return
            for message in messages:
                on_message(message)


class GatewayChannel(ChildChannel[DesiredModels]):
    """Channel to a gateway."""

    def __init__(self) -> None:
        super().__init__("gateway")
        self._writer = ChannelWriter(self._line)
        self._reader = ChannelReader(DesiredModels)

    def tell(self, model_states: ModelStates) -> None:
        """Send the models' states; `ChannelWriter` skips a repetition."""
        self._writer.send(model_states)

    def decode(self, data: bytes) -> Sequence[DesiredModels]:
        newest = self._reader.feed(data)
        return () if newest is None else (newest,)


class WorkerSpawnChannel(ChildChannel[Word]):
    """Channel to a worker process."""

    def __init__(self) -> None:
        super().__init__("worker")
        self._rest = b""

    def decode(self, data: bytes) -> Sequence[Word]:
        *lines, self._rest = (self._rest[-READ_BYTES:] + data).split(b"\n")
        return [word for word in map(decode_word, lines) if word is not None]
