"""Limits on concurrent requests per API key and on the memory of request bodies: counters and middlewares.

Every allocation must be freed; `KeyConcurrency.held` does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.middleware.context import context_of
from protocol.common.api_keys import ApiKey
from protocol.errors import Code, RequestError

LIMITS = (b"x-ratelimit-limit-requests", b"anthropic-ratelimit-requests-limit")
REMAINING = (b"x-ratelimit-remaining-requests", b"anthropic-ratelimit-requests-remaining")


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


class RateLimitMiddleware:
    """ASGI middleware, inside `AuthMiddleware`, that adds rate limit headers if the key has a limit.

    OpenAI's and Anthropic's clients expect their names. The limit is not a rate but a number of concurrent
    requests per key; the remainder counts the current request. There is no reset time: a slot is freed when a
    response ends. A rejected request gets Retry-After.
    """

    def __init__(self, app: ASGIApp, key_concurrency: KeyConcurrency) -> None:
        self._app = app
        self._key_concurrency = key_concurrency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = context_of(scope).key if scope["type"] == "http" else None
        if key is None or self._key_concurrency.limit(key) is None:
            await self._app(scope, receive, send)
            return

        async def send_with_quota(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers(key)]
            await send(message)

        await self._app(scope, receive, send_with_quota)

    def _headers(self, key: ApiKey) -> Iterator[tuple[bytes, bytes]]:
        for names, count in (
            (LIMITS, self._key_concurrency.limit(key)),
            (REMAINING, self._key_concurrency.available(key)),
        ):
            yield from ((name, b"%d" % (count or 0)) for name in names)


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


class BodyBudgetMiddleware:
    """ASGI middleware that takes a request's body out of a memory budget until its response has been sent.

    Until then the body is in memory, as bytes, parsed, or passed on. Beyond the budget, which all requests
    share, a request is refused with a 503. The size of one body is limited by `requests.request_body`.
    """

    def __init__(
        self,
        app: ASGIApp,
        budget: BodyBudget,
        refusal: Callable[[], RequestError],
        streamed: frozenset[str] = frozenset(),
    ) -> None:
        """`refusal`: returns the error for a request whose body exceeds the budget. `streamed`: paths whose
        bodies are not in memory, but written to a disk as they arrive."""
        self._app = app
        self._budget = budget
        self._refusal = refusal
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def receive_counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if not self._budget.allocate(size):
                raise self._refusal()
            held += size
            return message

        try:
            is_streamed = scope.get("path") in self._streamed
            await self._app(scope, receive if is_streamed else receive_counted, send)
        finally:
            self._budget.free(held)
