"""ASGI middleware that counts request bodies and what is in them while they are in the house, and stops at a
limit."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.http.limits import BodyBudget
from broker.http.media import MediaMemory
from protocol.errors import RequestError


class Intake:
    """What a request's body takes of the budget is given back when its answer has been sent: until then it
    lives on, read, parsed or passed on. So is what it holds of media, which is `media` in its state."""

    def __init__(
        self, app: ASGIApp, budget: BodyBudget, media: MediaMemory, refusal: Callable[[], RequestError]
    ) -> None:
        """`refusal`: what is raised into a request whose body finds no room."""
        self._app = app
        self._budget = budget
        self._media = media
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, media = 0, self._media.open()
        scope.setdefault("state", {})["media"] = media

        async def receive_counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if not self._budget.allocate(size):
                raise self._refusal()
            held += size
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._budget.free(held)
            media.free()
