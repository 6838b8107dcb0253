"""POST /v1/requests/ID/cancel: end a request in flight.

Where requests need API keys, a key ends only its own. A repeated cancellation succeeds again: a client whose
connection broke cannot know whether the first one did.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.middleware.json_response import JsonResponse
from broker.requests.clients import client_of
from broker.state import gateway_of, owner_of
from protocol.common.api_keys import ApiKey
from protocol.errors import Code, RequestError


async def cancel(request: Request) -> Response:
    """Fail a request in flight, by its id in the status; its client gets `request_cancelled`."""
    gateway, id = gateway_of(request), request.path_params["id"]
    flight = gateway.dispatcher.flights.get(id)
    key: ApiKey | None = getattr(request.state, "key", None)
    cancelled = JsonResponse({"id": id, "object": "request", "cancelled": True})
    if (owner_of(request), id) in gateway.cancelled:
        return cancelled
    if flight is None or flight.terminal is not None:
        raise RequestError(Code.ROUTE_NOT_FOUND, f"No request `{id}` is in flight.", param="id")
    if key is not None and flight.request.client != client_of(key, ""):
        raise RequestError(
            Code.ROUTE_NOT_FOUND, f"No request `{id}` of this API key is in flight.", param="id"
        )
    gateway.dispatcher.give_up(flight, Code.REQUEST_CANCELLED)
    gateway.cancelled.append((owner_of(request), id))
    return cancelled


ROUTES = [Route("/v1/requests/{id}/cancel", cancel, methods=["POST"])]
