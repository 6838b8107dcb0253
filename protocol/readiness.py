"""How the gateway tells the supervisor that a worker has become ready: its process id in a line, down a pipe.

The supervisor keeps the read end and hands the gateway the other, its number in ROUNDHOUSE_READINESS_FD. A
gateway that is started again gets the same pipe and says it again of every worker that introduces itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, MutableMapping

VARIABLE = "ROUNDHOUSE_READINESS_FD"


def teller(environ: MutableMapping[str, str]) -> Callable[[int], None] | None:
    """What to call with the process id of each worker that is ready; None: nobody wants to know.

    Takes what tells of the pipe out of `environ`.
    """
    if not (number := environ.pop(VARIABLE, "")).isdigit():
        return None
    fd = int(number)
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)

    def tell(pid: int) -> None:
        # Nobody reads, or not for long: then nobody waits for this worker either.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"%d\n" % pid)

    return tell
