"""A rank that follows, and takes no step any more once SIGUSR1 has come: all others wait for it in a
collective, while nothing has died and every connection stands.

It leaves out all of them: a single one the next would make up for, of the same size, with wrong numbers.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from worker.__main__ import main
from worker.ranks import calls
from worker.ranks.follower import Follower


def skip_on_signal() -> None:
    """From the next step on; whatever else it is called to, it does."""
    told = threading.Event()
    obey = Follower.obey

    def skipping(follower: Follower, call: calls.Call) -> None:
        if not (told.is_set() and isinstance(call, calls.Step)):
            obey(follower, call)

    def tell(_number: int, _frame: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGUSR1, tell)
    Follower.obey = skipping  # type: ignore[method-assign]


if __name__ == "__main__":
    skip_on_signal()
    sys.argv.remove("worker")  # by which the processes of a set are known
    raise SystemExit(main())
