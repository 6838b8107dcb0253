"""Burst gate: holds decoding until the prompts of requests that reach an idle worker together are prefilled.

Without it each started row rebuilds the batch, and prompts beside running streams are cut into chunks that
keep to the inter-token target. With it the first rows wait at most `GATHERED_S`, no stream waits between two
tokens, and all requests finish sooner. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.schedule.prefill_cost import PrefillCostModel, PrefillWork
from worker.schedule.rows import Row

GATHERED_S = 2.5
"""Longest wait of the first row, in seconds."""


def gathers(coming: Sequence[Row], pace: PrefillCostModel, waited_s: float) -> bool:
    """Return whether started rows without a token wait for the prompts of the rows in `coming`.

    `waited_s`: seconds since the first of them started.
    """
    if not coming or any(row.images for row in coming):
        return False  # the time to encode an image is unknown
    left_s = pace.seconds(PrefillWork.call(len(coming), max(row.left for row in coming), 0))
    return 0 < left_s <= GATHERED_S - waited_s
