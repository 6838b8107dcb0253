"""Watchdog of the model thread: decides from the I/O thread's observations whether it hangs. Pure.

A thread that hangs in a library cannot answer. The I/O thread knows the number of steps and of waiting
requests, and during loading the bytes loaded and the CPU time of the process.
"""

from __future__ import annotations

from dataclasses import dataclass

STALL_S_MAX = 120.0
"""Default timeout in seconds without a step."""
LOAD_STALL_S_MAX = 5400.0
"""Timeout in seconds without progress of loading. A download shows only as CPU time, and a leader waits up to
an hour for its followers (`worker.ranks.rendezvous`)."""
LOAD_CPU_S = 10.0
"""CPU seconds of the other threads that count as progress. Idle threads use less in `LOAD_STALL_S_MAX`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Observations of the model thread. `loaded`: bytes loaded and in total; `cpu_s`: CPU seconds of the
    process without the I/O thread. `commands`: number in its inbox; `unsent`: its messages that are not sent
    yet, for which it may be waiting."""

    is_loaded: bool = False
    loaded: tuple[int, int] = (0, 0)
    cpu_s: float = 0.0
    running: int = 0
    waiting: int = 0
    commands: int = 0
    steps: int = 0
    unsent: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.commands)


class Watchdog:
    """Watchdog of one model thread. `stall_s`: maximum seconds with work but without a step."""

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._sign: object = None
        self._commands = 0
        self._since = now

    def verdict(self, seen: Progress, now: float) -> str | None:
        """Return why the thread is considered hanging, or None."""
        sign: object
        if not seen.is_loaded:
            sign, limit_s = (seen.loaded, int(seen.cpu_s / LOAD_CPU_S)), LOAD_STALL_S_MAX
        elif seen.has_work and not seen.unsent:
            sign, limit_s = seen.steps, self._stall_s
        else:
            sign, limit_s = None, self._stall_s
        has_taken, self._commands = seen.commands < self._commands, seen.commands
        if sign is None or sign != self._sign or (seen.is_loaded and has_taken):
            self._sign, self._since = sign, now
            return None
        if now - self._since <= limit_s:
            return None
        if not seen.is_loaded:
            return f"loading made no progress for {now - self._since:.0f} s"
        rows = f"{seen.running} rows running, {seen.waiting} waiting"
        return f"no step for {now - self._since:.0f} s with {rows}, {seen.commands} commands unread"
