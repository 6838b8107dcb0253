"""Limits on concurrent requests per API key and on the memory of request bodies. Pure counters.

Every allocation must be freed; `held` does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import Code, RequestError


class KeyConcurrency:
    """Limit of concurrent requests per API key, identified by digest.

    Requests without a key are not counted.
    """

    def __init__(self, per_key_max: int | None = None) -> None:
        """`per_key_max`: None for no limit."""
        self.per_key_max = per_key_max
        self._held: Counter[bytes] = Counter()

    def available(self, key: bytes) -> int | None:
        """Return how many more requests this key may have in flight; None for no limit."""
        return None if self.per_key_max is None else self.per_key_max - self._held[key]

    def allocate(self, key: bytes, count: int, retry_after_s: Callable[[int], float]) -> None:
        """Allocate all `count` requests or none. `retry_after_s`: wait in seconds by number in flight.

        Raises `RequestError(rate_limit_exceeded)`, or `invalid_request` if `count` alone exceeds the limit.
        """
        most, held = self.per_key_max, self._held[key]
        if most is not None and held + count > most:
            if count > most:
                message = f"The request asks for {count} choices; the limit of an API key is {most}."
                raise RequestError(Code.INVALID_REQUEST, message, param="n")
            message = f"This API key has {held} requests in flight; the limit is {most}."
            raise RequestError(Code.RATE_LIMIT_EXCEEDED, message, retry_after_s=retry_after_s(held))
        self._held[key] += count

    def free(self, key: bytes, count: int) -> None:
        self._held[key] -= count
        if not self._held[key]:
            del self._held[key]

    @contextmanager
    def held(self, key: bytes | None, count: int, retry_after_s: Callable[[int], float]) -> Iterator[None]:
        """Call `allocate`, and `free` on exit."""
        if key is None:
            yield
            return
        self.allocate(key, count, retry_after_s)
        try:
            yield
        finally:
            self.free(key, count)

    def __len__(self) -> int:
        """Return the number of keys that have requests in flight."""
        return len(self._held)


class BodyBudget:
    """Memory budget for request bodies, in bytes, from their arrival until the response has been sent."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held = 0

    @property
    def available(self) -> int:
        return self._bytes_max - self.held

    def allocate(self, count: int) -> bool:
        """Allocate `count` bytes; returns False, without allocating, if they exceed the budget."""
        if count > self.available:
            return False
        self.held += count
        return True

    def free(self, count: int) -> None:
        self.held -= count
