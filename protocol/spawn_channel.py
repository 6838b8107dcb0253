"""Spawn channel: a socket pair between a supervisor and a worker process.

A worker reports on it, one line each, that its model is loaded; a spare also that it is waiting, and that it
has received its command line. A spare is a process that has imported everything a worker needs. It receives
the arguments of its command line over this channel, once, as JSON.

The descriptor's number is in ROUNDHOUSE_START_FD; ROUNDHOUSE_SPARE marks a spare.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import MutableMapping, Sequence
from typing import cast, get_args

import msgspec

from protocol.channel import Channel
from protocol.supervisor_messages import Word

VARIABLE = "ROUNDHOUSE_START_FD"
SPARE = "ROUNDHOUSE_SPARE"
WORDS_BYTES_MAX = 65_536

_WORDS = {word.encode(): word for word in get_args(Word)}


class SpawnChannel(Channel):
    """The worker's end of the spawn channel."""

    variable = VARIABLE

    def send(self, word: Word) -> None:
        """Send a word without blocking. It is lost if the supervisor has ended."""
        with contextlib.suppress(OSError):
            self._line.send(word.encode() + b"\n", socket.MSG_DONTWAIT)

    def read_assignment(self) -> list[str]:
        """Wait for the arguments of the command line. Raises `EOFError` when the supervisor has ended."""
        data = b""
        while not data.endswith(b"\n"):
            if not (more := self.receive()):
                raise EOFError("the supervisor has ended")
            data += more
        return msgspec.json.decode(data, type=list[str])

    def hand_on(self, environ: MutableMapping[str, str]) -> None:
        """Put the channel back into `environ`, for another part of this process."""
        environ[VARIABLE] = str(self._line.detach())


def encode(words: Sequence[str]) -> bytes:
    """Encode arguments for `read_assignment`. Raises `ValueError` if they are too long."""
    data = msgspec.json.encode(list(words)) + b"\n"
    if len(data) > WORDS_BYTES_MAX:
        raise ValueError(f"the command line is too long: {len(data)} bytes")
    return data


def decode(line: bytes) -> Word | None:
    """Decode a line; None if it is no known word."""
    return cast("Word | None", _WORDS.get(line))
