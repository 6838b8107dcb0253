"""Limits on concurrent requests per API key and on the memory of request bodies. Pure counters.

Every allocation must be freed; `held` does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.common.api_keys import ApiKey
from protocol.errors import Code, RequestError


class KeyConcurrency:
    """Limit of concurrent requests per API key: its own, or else that of all keys.

    Requests without a key are not counted.
    """

    def __init__(self, per_key_max: int | None = None) -> None:
        """`per_key_max`: for keys without a limit of their own; None for no limit."""
        self._per_key_max = per_key_max
        self._held: Counter[bytes] = Counter()  # by the key's digest

    def limit(self, key: ApiKey) -> int | None:
        """Return how many requests this key may have in flight; None for no limit."""
        return self._per_key_max if key.concurrent_max is None else key.concurrent_max

    def available(self, key: ApiKey) -> int:
        """Return how many more requests a key with a limit may have in flight."""
        return max(0, (self.limit(key) or 0) - self._held[key.digest])

    def allocate(self, key: ApiKey, count: int, retry_after_s: Callable[[int], float]) -> None:
        """Allocate all `count` requests or none. `retry_after_s`: wait in seconds by number in flight.

        Raises `RequestError(rate_limit_exceeded)`, or `invalid_request` if `count` alone exceeds the limit.
        """
        most, held = self.limit(key), self._held[key.digest]
        if most is not None and held + count > most:
            if count > most:
                message = f"The request asks for {count} choices; the limit of an API key is {most}."
                raise RequestError(Code.INVALID_REQUEST, message, param="n")
            message = f"This API key has {held} requests in flight; the limit is {most}."
            raise RequestError(Code.RATE_LIMIT_EXCEEDED, message, retry_after_s=retry_after_s(held))
        self._held[key.digest] += count

    def free(self, key: ApiKey, count: int) -> None:
        self._held[key.digest] -= count
        if not self._held[key.digest]:
            del self._held[key.digest]

    @contextmanager
    def held(self, key: ApiKey | None, count: int, retry_after_s: Callable[[int], float]) -> Iterator[None]:
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
