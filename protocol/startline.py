"""The line between a supervisor and the process of a worker, from its start on: a pair of sockets.

A worker says on it, a line for each, what the supervisor must know of it: that it has loaded its model; of a
spare, that it is there, and that it has taken what it was told. A spare is a process that has imported all
that a worker needs and waits: the words of its command line come down this line, once, as JSON.

The process finds the number of its end in ROUNDHOUSE_START_FD; ROUNDHOUSE_SPARE says that it is a spare.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import cast, get_args

import msgspec

from protocol.orders import Word

VARIABLE = "ROUNDHOUSE_START_FD"
SPARE = "ROUNDHOUSE_SPARE"
WORDS_BYTES_MAX = 65_536

_WORDS = {word.encode(): word for word in get_args(Word)}


class Starting:
    """The worker's end."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def find(cls, environ: MutableMapping[str, str]) -> Starting | None:
        """The line that this process was given, taken out of `environ`; None: there is no supervisor."""
        if not (number := environ.pop(VARIABLE, "")).isdigit():
            return None
        os.set_inheritable(int(number), False)
        return cls(socket.socket(fileno=int(number)))

    def say(self, word: Word) -> None:
        """Never waits. Nobody may be left to hear it."""
        with contextlib.suppress(OSError):
            self._line.send(word.encode() + b"\n", socket.MSG_DONTWAIT)

    def await_words(self) -> list[str]:
        """What this process is to be told, however long that takes. Raises `EOFError` when the supervisor is
        gone."""
        data = b""
        while not data.endswith(b"\n"):
            if not (more := self._line.recv(WORDS_BYTES_MAX)):
                raise EOFError("the supervisor is gone")
            data += more
        return msgspec.json.decode(data, type=list[str])

    def hand_on(self, environ: MutableMapping[str, str]) -> None:
        """Put it back, for another part of this process to find."""
        environ[VARIABLE] = str(self._line.detach())

    def close(self) -> None:
        self._line.close()


def encode(words: Sequence[str]) -> bytes:
    """As `await_words` reads them. Raises `ValueError` where they are too many."""
    data = msgspec.json.encode(list(words)) + b"\n"
    if len(data) > WORDS_BYTES_MAX:
        raise ValueError(f"a command line of {len(data)} bytes")
    return data


def decode(line: bytes) -> Word | None:
    """None: no such word."""
    return cast("Word | None", _WORDS.get(line))
