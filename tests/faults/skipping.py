"""A follower rank that skips all steps some time after SIGUSR1: the other ranks wait for it in a collective,
while all processes live and all connections are open.

It skips all steps, because after a single one the next collective, of the same size, would take its place
with wrong values.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from worker.__main__ import main
from worker.ranks import rpc
from worker.ranks.follower import Follower

STEPS_LEFT = 50
"""Steps that are still executed after the signal, so that the streams are under way when it stops."""


def skip_on_signal() -> None:
    """Skip all steps but the first ones after SIGUSR1; obey all other messages."""
    told, left = threading.Event(), iter(range(STEPS_LEFT))
    obey = Follower.obey

    def skipping(follower: Follower, call: rpc.Call) -> None:
        if not (told.is_set() and isinstance(call, rpc.RunStep)) or next(left, None) is not None:
            obey(follower, call)

    def tell(_number: int, _frame: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGUSR1, tell)
    Follower.obey = skipping  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    skip_on_signal()
    sys.argv.remove("worker")  # `tests.faults.sets` finds the ranks by this argument
    raise SystemExit(main())
