"""Logs as a disk has them that froze at an earlier write: the ends of the journal and of batches' results.

A client is told something once it is on the disk, so nothing is lost before the end that the journal's log
had when the last answer had arrived (`note` reads it); results of a batch under way are told to nobody.
Logs are cut there, at any byte. Behind the cut come nothing, zeros, noise or earlier bytes, as in blocks that
were allocated and not written. Two logs stay whole, as no disk has the rest of the state without them: a
journal's that may be copied into the database in part (a log begun anew, with other salts, may be missing as
a whole), and the results of a batch whose record says that all of them are there.
"""

from __future__ import annotations

import json
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
"""Share of the cuts that are made between two records; the others are made anywhere."""


class FrozenDisk:
    """The logs of a gateway. `outcomes` counts the cuts that took something."""

    def __init__(self, journal: Path, batches: Path, dice: random.Random) -> None:
        """`journal`: the database. `batches`: the folder with the results logs."""
        self.outcomes: Counter[str] = Counter()
        self._journal, self._batches, self._dice = journal, batches, dice
        self._wal = journal.with_name(journal.name + "-wal")
        self._noted: tuple[bytes, int] = (b"", 0)

    def note(self) -> None:
        """Note the end of the journal's log: a client has been told something."""
        self._noted = read_log(self._wal)

    def freeze(self) -> None:
        """Cut the ends of the logs. No process may have them open."""
        salts, end = read_log(self._wal)
        if end:
            noted_salts, noted_end = self._noted
            frames = range(HEAD_BYTES, end + 1, FRAME_BYTES)
            if self._wal.stat().st_mtime_ns <= self._journal.stat().st_mtime_ns:
                noted_end = end
            elif salts != noted_salts:
                noted_end = 0
            self._cut("journal", self._wal, noted_end, end, frames)
        for path in sorted(self._batches.glob("*.results")):
            record = json.loads(path.with_suffix(".json").read_bytes())
            if record["status"] == "in_progress" and path.stat().st_size:
                content = path.read_bytes()
                records = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
                self._cut("results", path, 0, len(content), records)

    def _cut(self, name: str, path: Path, start: int, end: int, edges: Sequence[int]) -> None:
        """Cut a log between `start` and `end`, and put something behind."""
        at = self._dice.randint(start, end)
        between = [edge for edge in edges if start <= edge <= end]
        if between and self._dice.random() < AT_AN_EDGE_SHARE:
            at = self._dice.choice(between)
        tail = self._tail(path.read_bytes()[:at], end - at + self._dice.randrange(TAIL_BYTES_MAX))
        with path.open("r+b") as file:
            file.truncate(at)
            file.seek(at)
            file.write(tail)
        self.outcomes[f"{name} cut"] += at < end

    def _tail(self, before: bytes, size: int) -> bytes:
        match self._dice.choice(TAILS):
            case "zeros":
                return bytes(size)
            case "noise":
                return self._dice.randbytes(size)
            case "repeated":
                return (before * (1 + size // max(1, len(before))))[:size]
        return b""


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
