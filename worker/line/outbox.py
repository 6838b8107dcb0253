"""From the model thread to the I/O thread: a queue the I/O thread can poll beside its socket."""

from __future__ import annotations

import contextlib
import queue
import socket

from protocol.messages import Message


class Outbox:
    """Messages on their way out. `put` from any thread, the rest from the I/O thread only."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Readable when something was put, or `wake` was called."""
        return self._reader.fileno()

    def depth(self) -> int:
        return self._messages.qsize()

    def put(self, message: Message) -> None:
        self._messages.put(message)
        self.wake()

    def wake(self) -> None:
        """Make the I/O thread look around. A full pipe is as good: it will look anyway."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def take(self, most: int) -> list[Message]:
        """At most so many messages, in order."""
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
