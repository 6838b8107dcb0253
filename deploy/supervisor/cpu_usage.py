"""CPU time of workers, from which the supervisor concludes that they are idle."""

from __future__ import annotations

import psutil

IDLE_S = 2.0
"""Interval over which CPU time is measured."""
IDLE_SHARE_MAX = 0.05
"""Maximum share of a core of an idle worker. It uses 0.3%; one that generates on a GPU uses far more."""


class IdleWatch:
    """Idle detection from cumulative CPU time, sampled once per `IDLE_S`."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None
        self._cpu_s = 0.0

    def due_in_s(self, now: float) -> float:
        """Return the seconds until the next sample is due. A sample of long ago is discarded."""
        if self._sampled_at is None or now - self._sampled_at > 2 * IDLE_S:
            self._sampled_at = None
            return 0.0
        return max(0.0, self._sampled_at + IDLE_S - now)

    def is_idle(self, cpu_s: float, now: float) -> bool:
        """Take a sample if one is due, and return whether hardly any CPU time was used since the last one.

        `cpu_s`: CPU seconds of all workers so far. It falls when one of them ends, which is no idleness.
        """
        if self.due_in_s(now) > 0:
            return False
        since, before_s = self._sampled_at, self._cpu_s
        self._sampled_at, self._cpu_s = now, cpu_s
        return since is not None and 0 <= cpu_s - before_s <= IDLE_SHARE_MAX * (now - since)


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has just ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return 0.0
    return float(times.user + times.system)
