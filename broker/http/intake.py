"""ASGI middleware that counts request bodies while they are in the house, and stops at a limit."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.http.limits import BodyBudget
from protocol.errors import RequestError


class Intake:
    """What a request's body takes of the budget is given back when its answer has been sent: until then it
    lives on, read, parsed or passed on."""

    def __init__(self, app: ASGIApp, budget: BodyBudget, refusal: Callable[[], RequestError]) -> None:
        """`refusal`: what is raised into a request whose body finds no room."""
        self._app = app
        self._budget = budget
        self._refusal = refusal

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
            await self._app(scope, receive_counted, send)
        finally:
            self._budget.free(held)
