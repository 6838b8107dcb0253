"""Quantization of rows' KV caches at their switch (see `contract.kv_quantization`), after what they hold is
stored."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract.engine import Engine
from worker.schedule.prefix_store import PrefixStore
from worker.schedule.rows import Chunk, Row
from worker.schedule.scheduler import Scheduler


def quantize(row: Row, engine: Engine, scheduler: Scheduler) -> None:
    """Quantize a row's cache, which is as long as its switch."""
    engine.quantize_cache(row.id)
    scheduler.quantized(row)


def quantize_restored(chunk: Chunk, engine: Engine, scheduler: Scheduler) -> None:
    """Quantize the cache that a chunk's stored prefix was restored to, if it is as long as the row's switch.
    A longer one is quantized already."""
    if chunk.match is not None and chunk.match.length >= chunk.row.switch:
        quantize(chunk.row, engine, scheduler)


def quantize_due(
    rows: Sequence[Row], engine: Engine, scheduler: Scheduler, store: PrefixStore | None
) -> None:
    """Quantize the caches of rows whose output has reached their switch, before the next step."""
    for row in rows:
        is_due = row.length >= row.switch and not row.is_quantized
        if is_due and engine.cached_tokens(row.id) >= row.switch:
            if store:
                store.keep_exact(row)
            quantize(row, engine, scheduler)
