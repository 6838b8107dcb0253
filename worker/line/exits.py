"""How a worker ends whose model thread has: in words for the log, and as a status for whoever started it."""

from __future__ import annotations

import logging

from protocol.settings import EXIT_CONFIGURATION
from worker.contract import ModelError, NoRoomError

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""sysexits' EX_SOFTWARE: a fresh process is the cure."""
EXIT_NO_ROOM = 75
"""sysexits' EX_TEMPFAIL: whoever starts it again does so later and later, and not for ever."""


def status_of(failure: BaseException | None) -> int:
    """The exit status for what has ended the model thread, which is logged."""
    match failure:
        case ModelError():
            log.error("%s", failure)
            return EXIT_CONFIGURATION
        case NoRoomError():
            log.error("%s", failure)
            return EXIT_NO_ROOM
        case _:
            log.critical("the model thread ended: %r", failure, exc_info=failure)
            return EXIT_BROKEN
