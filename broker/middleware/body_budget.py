"""ASGI middleware that limits the memory of the request bodies in flight."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.middleware.limits import BodyBudget
from protocol.errors import RequestError


class BodyBudgetMiddleware:
    """ASGI middleware that takes a request's body out of a budget until its response has been sent.

    Until then the body is in memory, as bytes, parsed, or passed on.
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
