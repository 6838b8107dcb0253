"""What one client, and all of them together, may hold of the gateway. Pure: counters, and what they refuse.

Whoever allocates frees as much when done; `held` takes care of it. When nobody is in the house, nothing is
held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import Code, RequestError


class Shares:
    """How many requests each API key, known by its digest, has in the house. Callers without one are not
    counted."""

    def __init__(self, per_key_max: int | None = None) -> None:
        """None: as many as the server takes."""
        self.per_key_max = per_key_max
        self._held: Counter[bytes] = Counter()

    def available(self, key: bytes) -> int | None:
        """How many more this key may have; None: no limit."""
        return None if self.per_key_max is None else self.per_key_max - self._held[key]

    def allocate(self, key: bytes, count: int, retry_after_s: Callable[[int], float]) -> None:
        """All `count` or none. `retry_after_s`: of so many requests, when one can be expected to be done.

        Raises `RequestError(rate_limit_exceeded)`, or `invalid_request` where there would never be room.
        """
        most, held = self.per_key_max, self._held[key]
        if most is not None and held + count > most:
            if count > most:
                message = f"{count} answers are asked for, and an API key may have {most} at once."
                raise RequestError(Code.INVALID_REQUEST, message, param="n")
            message = f"This API key has {held} requests in the house, and may have {most} at once."
            raise RequestError(Code.RATE_LIMIT_EXCEEDED, message, retry_after_s=retry_after_s(held))
        self._held[key] += count

    def free(self, key: bytes, count: int) -> None:
        self._held[key] -= count
        if not self._held[key]:
            del self._held[key]

    @contextmanager
    def held(self, key: bytes | None, count: int, retry_after_s: Callable[[int], float]) -> Iterator[None]:
        """`allocate`, and `free` at the end."""
        if key is None:
            yield
            return
        self.allocate(key, count, retry_after_s)
        try:
            yield
        finally:
            self.free(key, count)

    def __len__(self) -> int:
        """Keys that have requests in the house."""
        return len(self._held)


class BodyBudget:
    """Bytes of request bodies in the house, from their arrival until their answer has been sent."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held = 0

    @property
    def available(self) -> int:
        return self._bytes_max - self.held

    def allocate(self, count: int) -> bool:
        """False, and nothing is held, where there is no room for them."""
        if count > self.available:
            return False
        self.held += count
        return True

    def free(self, count: int) -> None:
        self.held -= count
