"""Settings of a worker of several ranks."""

from __future__ import annotations

import msgspec

from protocol.settings.worker import WorkerSettings

SET_STALL_S_MAX = 20.0
"""Default stall timeout of several ranks. A rank that waits for a lost peer never continues by itself."""


def of_set(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings adapted to several ranks: no prefix cache on disk, and a shorter stall timeout."""
    stall_s = settings.stall_timeout_s or SET_STALL_S_MAX
    return msgspec.structs.replace(settings, stall_timeout_s=stall_s, prefix_cache_disk=0)
