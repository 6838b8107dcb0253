"""How much more a key may ask for, as OpenAI's and Anthropic's clients look for it.

What is limited here is no rate but a share: how many of its requests are in the house at once, whatever time
they take. So there is a limit and what remains of it, the request that is answered counted, and no moment at
which it is reset: that is when an answer ends. Who is refused is told by Retry-After when to come back.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.http.auth import Key
from broker.http.limits import Shares

LIMITS = (b"x-ratelimit-limit-requests", b"anthropic-ratelimit-requests-limit")
REMAINING = (b"x-ratelimit-remaining-requests", b"anthropic-ratelimit-requests-remaining")


class Quota:
    """ASGI middleware, inside of the guard: every answer to a key says it, where keys have a limit."""

    def __init__(self, app: ASGIApp, shares: Shares) -> None:
        self._app = app
        self._shares = shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key: Key | None = scope.get("state", {}).get("key")
        if key is None or self._shares.per_key_max is None:
            await self._app(scope, receive, send)
            return

        async def send_with_quota(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers(key)]
            await send(message)

        await self._app(scope, receive, send_with_quota)

    def _headers(self, key: Key) -> Iterator[tuple[bytes, bytes]]:
        for names, count in (
            (LIMITS, self._shares.per_key_max),
            (REMAINING, self._shares.available(key.digest)),
        ):
            yield from ((name, b"%d" % (count or 0)) for name in names)
