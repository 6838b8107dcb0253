"""Channels between a supervisor and the processes that it starts: socket pairs, one message a line.

The *supervisor channel* carries `supervisor_messages` as JSON to and from the gateway. On the *spawn channel*
a worker reports that its model is loaded; a spare also that it is waiting, and that it has received its
settings. A spare is a process that has imported everything a worker needs. A process finds the number of its
descriptor in a variable. Without arguments on its command line, it receives its settings as the first line,
as JSON: a spare when it is needed, any other process at once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import MutableMapping
from typing import ClassVar, Generic, Self, TypeVar, cast, get_args

import msgspec

from protocol.supervisor_messages import DesiredModels, ModelStates, Word

SUPERVISOR_FD = "ROUNDHOUSE_SUPERVISOR_FD"
SPAWN_FD = "ROUNDHOUSE_START_FD"
SPARE = "ROUNDHOUSE_IS_SPARE"
"""Variables: the descriptor of either channel, and the mark of a spare."""

READ_BYTES = 65_536
LINE_BYTES_MAX = 2**20

SETTINGS_BYTES_MAX = 131_072
"""Size of the settings of a process, which a socket's buffer holds before the process runs."""

_WORDS = {word.encode(): word for word in get_args(Word)}

Said = TypeVar("Said", ModelStates, DesiredModels)


class Channel:
    """End of a channel. `variable`: where a process finds the descriptor that it has inherited."""

    variable: ClassVar[str]

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def find(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take this process's channel out of `environ`; None: there is no supervisor."""
        if not (number := environ.pop(cls.variable, "")).isdigit():
            return None
        line = socket.socket(fileno=int(number))
        line.set_inheritable(False)
        return cls(line)

    def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises `BlockingIOError` if the socket does not block."""
        try:
            return self._line.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def read_settings(self) -> bytes:
        """Wait for the first line, a process's settings, and take no more. Raises `EOFError` when the
        supervisor has ended."""
        data = b""
        while not data.endswith(b"\n"):
            if not (next_bytes := self._line.recv(READ_BYTES, socket.MSG_PEEK)):
                raise EOFError("the supervisor has ended")
            data += self._line.recv(next_bytes.find(b"\n") + 1 or len(next_bytes))
        return data

    def close(self) -> None:
        self._line.close()


class ChannelWriter:
    """Writer of JSON lines. Never blocks: a slow reader skips to the newest message."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._next = b""
        self._latest: ModelStates | DesiredModels | None = None

    def send(self, message: ModelStates | DesiredModels) -> None:
        """Send `message`, unless it equals the last one."""
        if message != self._latest:
            self._latest = message
            self._next = msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Continue to send what did not fit into the socket's buffer."""
        # The end of a closed peer is noticed as end of file when reading.
        with contextlib.suppress(BlockingIOError, OSError):
            while self._rest or self._next:
                if not self._rest:
                    self._rest, self._next = self._next, b""
                sent = self._line.send(self._rest, socket.MSG_DONTWAIT)
                self._rest = self._rest[sent:]


class ChannelReader(Generic[Said]):
    """Reader of JSON lines: takes bytes, returns the newest complete message."""

    def __init__(self, kind: type[Said]) -> None:
        self._decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(kind)
        self._rest = b""

    def feed(self, data: bytes) -> Said | None:
        """Return the newest complete message, or None. Raises `ValueError` if it is invalid."""
        *lines, self._rest = (self._rest + data).rsplit(b"\n", 1)
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError("the line is too long")
        return self._decoder.decode(lines[0].rpartition(b"\n")[2]) if lines else None


class SpawnChannel(Channel):
    """The worker's end of the spawn channel."""

    variable = SPAWN_FD

    def send(self, word: Word) -> None:
        """Send a word without blocking. It is lost if the supervisor has ended."""
        with contextlib.suppress(OSError):
            self._line.send(word.encode() + b"\n", socket.MSG_DONTWAIT)

    def hand_on(self, environ: MutableMapping[str, str]) -> None:
        """Put the channel back into `environ`, for another part of this process."""
        environ[SPAWN_FD] = str(self._line.detach())


def encode_settings(settings: msgspec.Struct) -> bytes:
    """Encode the settings of a process for `read_settings`."""
    return msgspec.json.encode(settings, enc_hook=str) + b"\n"


def decode_word(line: bytes) -> Word | None:
    """Decode a line; None if it is no known word."""
    return cast("Word | None", _WORDS.get(line))
