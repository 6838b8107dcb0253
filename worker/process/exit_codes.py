"""Exit status and log line of a worker whose model thread has ended.

Others: 0 after an orderly stop, 1 if the supervisor's lifeline or a hang's watchdog ends the process, 78 for
settings that cannot work (under launchd 0, see `protocol.settings.job_status`), or the number of a signal.
"""

from __future__ import annotations

import logging

from protocol.settings.reader import EXIT_CONFIGURATION
from worker.interfaces import InsufficientMemoryError, ModelError
from worker.process.device_errors import DeviceError

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""sysexits' EX_SOFTWARE: a restart helps."""
EXIT_DEVICE = 71
"""sysexits' EX_OSERR: the GPU has failed; a restart helps."""
EXIT_NO_ROOM = 75
"""sysexits' EX_TEMPFAIL: restarts are repeated with backoff, a limited number of times."""


def status_of(failure: BaseException | None) -> int:
    """Log the failure that ended the model thread, and return the exit status."""
    match failure:
        case ModelError():
            log.error("%s", failure)
            return EXIT_CONFIGURATION
        case InsufficientMemoryError():
            log.error("%s", failure)
            return EXIT_NO_ROOM
        case DeviceError():
            log.critical("%s; this process ends", failure)
            return EXIT_NO_ROOM if failure.is_out_of_memory else EXIT_DEVICE
        case _:
            log.critical("the model thread ended: %r", failure, exc_info=failure)
            return EXIT_BROKEN
