"""What the engine is told of rows beside their tokens: adapters, images, gaps, and which to drop."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract.engine import Engine
from worker.schedule.rows import Group


def set_inputs(engine: Engine, group: Group) -> None:
    """Pass the engine the adapters and images of rows whose caches are about to be created, and the gaps of
    others."""
    for row in (chunk.row for chunk in group):
        if row.request.adapter and not row.prefilled:
            engine.set_adapter(row.id, row.request.adapter)
        if row.images and not row.prefilled:
            engine.set_images(row.id, row.tokens, row.images)
        if gap := row.gap(row.prefilled):
            engine.skip_tokens(row.id, row.prefilled - gap, row.prefilled)


def drop_rows(engine: Engine, group: Group) -> None:
    """Drop the caches of all rows of a group."""
    for chunk in group:
        engine.drop(chunk.row.id)


def evict_images(engine: Engine, digests: Sequence[str]) -> None:
    """Evict images from the engine."""
    for digest in digests:
        engine.evict_image(digest)
