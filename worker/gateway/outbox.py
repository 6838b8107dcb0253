"""Queue from the model thread to the I/O thread, which can poll it together with its socket."""

from __future__ import annotations

import contextlib
import queue
import socket

from protocol.messages import Message


class Outbox:
    """Queue of outgoing messages. `put` and `wake` from any thread, the rest from the I/O thread only."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable after `put` or `wake`."""
        return self._reader.fileno()

    def depth(self) -> int:
        return self._messages.qsize()

    def put(self, message: Message) -> None:
        self._messages.put(message)
        self.wake()

    def wake(self) -> None:
        """Wake the I/O thread. If the socket is full, it is already due to wake."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def take(self, most: int) -> list[Message]:
        """Return at most `most` messages, in order."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        messages: list[Message] = []
        while len(messages) < most:
            try:
                messages.append(self._messages.get_nowait())
            except queue.Empty:
                return messages
        self.wake()
        return messages

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
