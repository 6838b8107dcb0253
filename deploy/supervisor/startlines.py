"""The supervisor's end of the line to a worker's process (`protocol.startline`): each process has its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from protocol import startline
from protocol.orders import Word

_READ_BYTES = 4096
_CLOSE_S_MAX = 5.0


class StartLine:
    """`on_word` is called on a thread of its own, until the process has gone or the line is closed."""

    def __init__(self) -> None:
        self._line, self.theirs = socket.socketpair()
        """`theirs`: the end that the process inherits; to be closed here once it has."""
        self._thread: threading.Thread | None = None

    def listen(self, on_word: Callable[[Word], None]) -> None:
        """Once, when the process has started."""
        self.theirs.close()
        self._thread = threading.Thread(target=self._hear, args=(on_word,), name="startline", daemon=True)
        self._thread.start()

    def tell(self, words: Sequence[str]) -> bool:
        """Whether a spare could be told what it is."""
        try:
            data = startline.encode(words)
            return self._line.send(data, socket.MSG_DONTWAIT) == len(data)
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        self.theirs.close()
        with contextlib.suppress(OSError):  # macOS: the other end has gone
            self._line.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)
        self._line.close()

    def _hear(self, on_word: Callable[[Word], None]) -> None:
        rest = b""
        while data := self._receive():
            *lines, rest = (rest[-_READ_BYTES:] + data).split(b"\n")
            for word in map(startline.decode, lines):
                if word is not None:
                    on_word(word)

    def _receive(self) -> bytes:
        try:
            return self._line.recv(_READ_BYTES)
        except OSError:
            return b""
