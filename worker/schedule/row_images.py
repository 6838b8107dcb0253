"""Images and skipped tokens of rows, passed to the engine before the rows run."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract.engine import Engine
from worker.schedule.rows import Group


def show(engine: Engine, group: Group) -> None:
    """Pass the engine the images of rows whose caches are about to be created, and the gaps of others."""
    for row in (chunk.row for chunk in group):
        if row.images and not row.prefilled:
            engine.set_images(row.id, row.tokens, row.images)
        if gap := row.gap(row.prefilled):
            engine.skip_tokens(row.id, row.prefilled - gap, row.prefilled)


def forget(engine: Engine, digests: Sequence[str]) -> None:
    """Evict images from the engine."""
    for digest in digests:
        engine.evict_image(digest)
