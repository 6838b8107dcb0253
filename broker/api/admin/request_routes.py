"""POST /v1/requests/ID/cancel: end a request in flight.

Where requests need API keys, a key ends only its own. A repeated cancellation succeeds again: a client whose
connection broke cannot know whether the first one did.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.state import gateway_of
from protocol.errors import Code, RequestError


async def cancel(request: Request) -> Response:
    """Fail a request in flight, by its id in the status; its client gets `request_cancelled`."""
    gateway, context, id = gateway_of(request), context_of(request), request.path_params["id"]
    flight = gateway.dispatcher.flights.get(id)
    cancelled = JsonResponse({"id": id, "object": "request", "cancelled": True})
    if (context.owner, id) in gateway.cancelled:
        return cancelled
    if flight is None or flight.terminal is not None:
        raise RequestError(Code.ROUTE_NOT_FOUND, f"No request `{id}` is in flight.", param="id")
    if context.key is not None and flight.request.client != context.client:
        raise RequestError(
            Code.ROUTE_NOT_FOUND, f"No request `{id}` of this API key is in flight.", param="id"
        )
    gateway.dispatcher.give_up(flight, Code.REQUEST_CANCELLED)
    gateway.cancelled.append((context.owner, id))
    return cancelled


ROUTES = [Route("/v1/requests/{id}/cancel", cancel, methods=["POST"])]
