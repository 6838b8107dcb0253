"""Parking of batch rows: lines of batches give way to every other request. Pure.

While there is any other row, running or waiting, batch rows hold no place and no memory. They wait in line
with their answers so far; their caches are in the prefix store, from which they go on with the same text.
"""

from __future__ import annotations

from protocol.types import BATCH_PRIORITY
from worker.schedule.rows import Row


def is_batch(row: Row) -> bool:
    """Return whether a row is a line of a batch."""
    return row.request.priority >= BATCH_PRIORITY


class Parking:
    """Numbers of batch rows and of others, of one scheduler."""

    def __init__(self) -> None:
        self._batch = 0
        self._others = 0

    def add(self, row: Row) -> None:
        """Count a new row."""
        self._count(row, 1)

    def drop(self, row: Row) -> None:
        """Count a row that has left."""
        self._count(row, -1)

    def _count(self, row: Row, by: int) -> None:
        if is_batch(row):
            self._batch += by
        else:
            self._others += by

    @property
    def is_active(self) -> bool:
        """Whether batch rows give way to others now."""
        return self._batch > 0 and self._others > 0

    @property
    def has_batch_only(self) -> bool:
        """Whether all rows are batch rows, so that another request may come at any time."""
        return self._batch > 0 and not self._others

    def holds(self, row: Row) -> bool:
        """Return whether a row gives way to others now."""
        return self.is_active and is_batch(row)
