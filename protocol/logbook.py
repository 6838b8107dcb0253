"""What a worker was about, in a place that its death does not reach.

The supervisor hands its child a file without a name, its descriptor's number in ROUNDHOUSE_LOGBOOK_FD. A
worker keeps a line in it, and the supervisor reads that once the child is gone. No prompt's text goes in.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping, Sequence

from protocol.parts import RowStatus

VARIABLE = "ROUNDHOUSE_LOGBOOK_FD"
BYTES_MAX = 2048
NAMED_MAX = 16


class Logbook:
    """The child's end of it."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes what tells of the file out of `environ`. Where nothing does, nothing is kept."""
        number = environ.pop(VARIABLE, "")
        self._fd = int(number) if number.isdigit() else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def note(self, line: str) -> None:
        """In place of what was noted before, in one piece."""
        if self._fd is not None:
            os.pwrite(self._fd, line.encode()[:BYTES_MAX].ljust(BYTES_MAX), 0)


class Page:
    """The supervisor's end: hand `fd` to a child, and `close` when that is gone."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        with tempfile.TemporaryFile() as file:
            self.fd = os.dup(file.fileno())

    def close(self) -> str:
        """What the child was about at last; "" if it did not say."""
        line = os.pread(self.fd, BYTES_MAX, 0)
        os.close(self.fd)
        return line.decode(errors="replace").strip()


def describe(steps: int, rows: Sequence[RowStatus]) -> str:
    """Who is aboard, and where each stands, in a line."""
    if not rows:
        return f"idle after step {steps}"
    named = [f"{row.id} {_where(row)}" for row in rows[:NAMED_MAX]]
    more = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    count = "1 request" if len(rows) == 1 else f"{len(rows)} requests"
    return f"at step {steps} with {count} aboard: {', '.join(named)}{more}"


def _where(row: RowStatus) -> str:
    match row.phase:
        case "prefill":
            return f"(prefill, {row.prefilled} of {row.prompt_tokens})"
        case "decode":
            return f"(decode, {row.answered})"
        case phase:
            return f"({phase})"
