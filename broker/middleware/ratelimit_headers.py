"""Rate limit headers, with the names that OpenAI's and Anthropic's clients expect.

The limit is not a rate but a number of concurrent requests per key. The headers give the limit and the
remainder, counting the current request. There is no reset time: a slot is freed when a response ends. A
rejected request gets Retry-After.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.middleware.context import context_of
from broker.middleware.limits import KeyConcurrency
from protocol.common.api_keys import ApiKey

LIMITS = (b"x-ratelimit-limit-requests", b"anthropic-ratelimit-requests-limit")
REMAINING = (b"x-ratelimit-remaining-requests", b"anthropic-ratelimit-requests-remaining")


class RateLimitMiddleware:
    """ASGI middleware, inside `AuthMiddleware`, that adds the headers to responses if the key has a limit."""

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
