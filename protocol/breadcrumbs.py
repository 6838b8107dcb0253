"""Breadcrumbs: a worker's last known state, in a file that survives its crash.

The supervisor passes its child a file, with the descriptor's number in ROUNDHOUSE_BREADCRUMBS_FD. The worker
keeps one line in it, and the supervisor reads it after the child has ended. It has no prompt text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping, Sequence

from protocol.types import RequestStatus

VARIABLE = "ROUNDHOUSE_BREADCRUMBS_FD"
BYTES_MAX = 2048
NAMED_MAX = 16


class BreadcrumbWriter:
    """Writer of the breadcrumb, in the child."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the descriptor's number out of `environ`. Without one, `note` does nothing."""
        number = environ.pop(VARIABLE, "")
        self._fd = int(number) if number.isdigit() else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def note(self, line: str) -> None:
        """Overwrite the breadcrumb with `line`, in one write."""
        if self._fd is not None:
            os.pwrite(self._fd, line.encode()[:BYTES_MAX].ljust(BYTES_MAX), 0)


class BreadcrumbSlot:
    """The supervisor's end: pass `fd` to a child, and call `close` when the child has ended."""

    def __init__(self) -> None:
        """Create the file, which has no name. Raises `OSError`."""
        with tempfile.TemporaryFile() as file:
            self.fd = os.dup(file.fileno())

    def close(self) -> str:
        """Close the file. Return the child's last breadcrumb, or "" if it wrote none."""
        line = os.pread(self.fd, BYTES_MAX, 0)
        os.close(self.fd)
        return line.decode(errors="replace").strip()


def describe(steps: int, rows: Sequence[RequestStatus]) -> str:
    """Return one line with the worker's requests and the phase of each."""
    if not rows:
        return f"idle after step {steps}"
    named = [f"{row.id} {_where(row)}" for row in rows[:NAMED_MAX]]
    more = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    count = "1 request" if len(rows) == 1 else f"{len(rows)} requests"
    return f"at step {steps} with {count} in flight: {', '.join(named)}{more}"


def _where(row: RequestStatus) -> str:
    match row.phase:
        case "prefill":
            return f"(prefill, {row.prefilled} of {row.prompt_tokens})"
        case "decode":
            return f"(decode, {row.answered})"
        case phase:
            return f"({phase})"
