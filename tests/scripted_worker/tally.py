"""Numbers of the tokens that a scripted engine has computed, in a file that other processes read."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<QQ")


@dataclass(slots=True)
class TokenTally:
    """`prefilled`: tokens of prompts, and of output that was fed again. `sampled`: tokens of output."""

    prefilled: int = 0
    sampled: int = 0

    @classmethod
    def read(cls, path: Path) -> TokenTally:
        return cls(*_LAYOUT.unpack(path.read_bytes()))


class TallyFile:
    """The tally of one engine, on disk after each change. Without a path nothing is counted."""

    def __init__(self, path: Path | None = None) -> None:
        self._tally = TokenTally()
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.add()

    def add(self, *, prefilled: int = 0, sampled: int = 0) -> None:
        if self._file is not None:
            tally = self._tally
            tally.prefilled += prefilled
            tally.sampled += sampled
            os.pwrite(self._file, _LAYOUT.pack(tally.prefilled, tally.sampled), 0)
