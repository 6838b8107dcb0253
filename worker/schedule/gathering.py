"""Who comes together begins together. Pure.

Rows that start one after the other each have the batch laid out anew, and prompts beside streams are run in
pieces that keep to the streams' pace. Where many requests come to an idle worker, and all of their prompts
take but a moment, none of them decodes before that is over: the first ones wait for that moment, nobody waits
between two tokens, and all have ended sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.schedule.pace import Pace, Work
from worker.schedule.rows import Row

GATHERED_S = 0.5
"""So long the first one waits at the most."""


def gathers(coming: Sequence[Row], pace: Pace, waited_s: float) -> bool:
    """Whether rows that have started and said nothing yet, the first of them `waited_s` ago, wait for those
    that are `coming`."""
    if not coming or any(row.pictures for row in coming):
        return False  # nobody knows what an image takes
    left_s = pace.seconds(Work.call(len(coming), max(row.left for row in coming), 0))
    return 0 < left_s <= GATHERED_S - waited_s
