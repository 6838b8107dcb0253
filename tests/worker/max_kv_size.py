"""Capped KV caches on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.max_kv_size --seeds 10 --architecture dense

Plays what `tests.worker.kv_bits` plays, with several caps and prefill steps.
"""

from __future__ import annotations

from tests.worker.kv_bits import differences
from tests.worker.zoo import main
from worker.contract.kv_cap import KVCap
from worker.engine.caches import grouping

CAPS = (KVCap(16, step=32), KVCap(24, step=16), KVCap(50, step=20), KVCap(8), KVCap(100))
"""Below a prefill step and above one, and upstream's step, longer than any prompt."""

if __name__ == "__main__":
    grouping.COLUMNS_STEP = 16  # so that short rows outgrow their buffers
    settings = [{"kv_cap": cap} for cap in CAPS]
    raise SystemExit(main("Capped KV caches, held against upstream alone.", differences, settings))
