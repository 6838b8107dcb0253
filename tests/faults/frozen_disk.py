"""Logs as a disk has them that froze at an earlier write: the ends of the journal and of batches' results.

What may be lost. A client is told something once it is on the disk: the journal syncs its log after each
group (SQLite's, `synchronous = FULL`), a batch its results log after each append. So:

* what a client was told about responses is below the end that the journal's log had when the last answer had
  arrived, which `note` reads. A disk that froze at a later write has any shorter log than the process left,
  down to that end;
* no client is told results of a batch that is not over, so all of its results log may be missing.

A cut is made there, at any byte. Behind it the log ends, or has zeros, random bytes or a repetition of
earlier ones, as blocks have that were allocated and not written. Nothing else is touched, so nothing may be
lost.

Two logs are left as they are, because no disk has had the rest of the state with a shorter one:
* a journal's that is, or may be, partly copied into the database: the database was written after it. When the
  copy is complete, SQLite begins its log anew with other salts; then all of the new one may be missing;
* the results of a batch whose record says that all of them are there.
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
    """The logs of a gateway. `outcomes` counts the cuts, those that took something, and the bytes."""

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
        self.outcomes[f"{name} cut"] += 1
        self.outcomes[f"{name} shortened"] += at < end
        self.outcomes[f"{name} bytes lost"] += end - at

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
