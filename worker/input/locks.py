"""Lock acquisition with a timeout, for resources that threads share and open once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

OPEN_S_MAX = 300.0
"""Timeout for another thread that opens a tokenizer or a processor. It takes seconds, or minutes on a slow
disk; one that hangs must not block the whole thread pool."""


@contextmanager
def acquired(lock: Lock, what: str, within_s: float = OPEN_S_MAX) -> Iterator[None]:
    """Context manager: hold `lock`. Raises `TimeoutError`, which names `what`, after `timeout_s` seconds."""
    if not lock.acquire(timeout=within_s):
        raise TimeoutError(f"{what} was not opened within {within_s:g} s")
    try:
        yield
    finally:
        lock.release()
