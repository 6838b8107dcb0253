"""What the engine is told of rows before any of them is run: what they are shown, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract import Engine
from worker.schedule.rows import Group


def show(engine: Engine, group: Group) -> None:
    """The images of rows whose caches begin now, for the first time or anew, and the gaps of others."""
    for row in (chunk.row for chunk in group):
        if row.pictures and not row.prefilled:
            engine.show(row.id, row.tokens, row.pictures)
        if gap := row.gap(row.prefilled):
            engine.leave_out(row.id, row.prefilled - gap, row.prefilled)


def forget(engine: Engine, digests: Sequence[str]) -> None:
    """Images that need not be kept any more."""
    for digest in digests:
        engine.forget(digest)
