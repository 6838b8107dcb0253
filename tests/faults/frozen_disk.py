"""SQLite's logs as a disk has them that froze at an earlier write: of the journal, and of batches.

A client is told something once it is on the disk, so nothing is lost before the end that a log had when the
last answer had arrived (`note` reads it). Logs are cut there, at any byte. Behind it come nothing, zeros,
noise or earlier bytes, as in blocks that were allocated and not written. A log that may be copied into the
database in part stays whole, as no disk has the rest of the state without it; one begun anew, with other
salts, may be missing as a whole.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HEAD_BYTES, FRAME_BYTES = 32, 24 + 4096
"""SQLite's log: its head, and a frame with a page. The salts are in both."""
TAIL_BYTES_MAX = 10_000
"""Most bytes that are put behind a log beyond its former end."""
TAILS = ("nothing", "zeros", "noise", "repeated")
AT_AN_EDGE_SHARE = 0.3
"""Share of the cuts that are made between two frames; the others are made anywhere."""


class FrozenDisk:
    """The logs of a gateway. `outcomes` counts the cuts that took something."""

    def __init__(self, databases: Sequence[Path], dice: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._databases, self._dice = databases, dice
        self._noted: dict[Path, tuple[bytes, int]] = {}

    def note(self) -> None:
        """Note the ends of the logs: a client has been told something."""
        self._noted = {path: read_log(_log_of(path)) for path in self._databases}

    def freeze(self) -> None:
        """Cut the ends of the logs. No process may have them open."""
        for path in self._databases:
            log = _log_of(path)
            salts, end = read_log(log)
            noted_salts, noted_end = self._noted.get(path, (b"", 0))
            if end and log.stat().st_mtime_ns <= path.stat().st_mtime_ns:
                noted_end = end
            elif salts != noted_salts:
                noted_end = 0
            if end:
                self._cut(log, noted_end, end)

    def _cut(self, log: Path, start: int, end: int) -> None:
        """Cut a log between `start` and `end`, and put something behind."""
        at = self._dice.randint(start, end)
        between = [edge for edge in range(HEAD_BYTES, end + 1, FRAME_BYTES) if start <= edge <= end]
        if between and self._dice.random() < AT_AN_EDGE_SHARE:
            at = self._dice.choice(between)
        tail = self._tail(log.read_bytes()[:at], end - at + self._dice.randrange(TAIL_BYTES_MAX))
        with log.open("r+b") as file:
            file.truncate(at)
            file.seek(at)
            file.write(tail)
        self.outcomes[f"{log.name} cut"] += at < end

    def _tail(self, before: bytes, size: int) -> bytes:
        match self._dice.choice(TAILS):
            case "zeros":
                return bytes(size)
            case "noise":
                return self._dice.randbytes(size)
            case "repeated":
                return (before * (1 + size // max(1, len(before))))[:size]
        return b""


def _log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def read_log(path: Path) -> tuple[bytes, int]:
    """Return the salts of SQLite's log, and where its frames end; 0 if it has none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b"", 0
    if len(content) < HEAD_BYTES:
        return b"", 0
    salts, end = content[16:24], HEAD_BYTES
    while content[end + 8 : end + 16] == salts:
        end += FRAME_BYTES
    return salts, min(end, len(content))
