"""POST /v1/requests/ID/cancel: end a request in flight.

Where requests need API keys, a key ends only its own. A repeated cancellation succeeds again: a client whose
connection broke cannot know whether the first one did.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.admin.report import StatusSnapshot, reuse_of
from broker.api.tokens import tokens
from broker.dispatch.inspection import CapturedRequest
from broker.dispatch.traffic import code_of
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests.generation import respond
from broker.state import gateway_of
from protocol.errors import Code, RequestError
from protocol.messages import Accepted
from protocol.types import TokenizeOptions


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


# GET /v1/inspect[/ID]: the last requests as received, and their prompts as tokens. Needs `--inspect`.

BODY_CHARACTERS_MAX = 64 * 1024


async def list_kept(request: Request) -> Response:
    """List the captured requests, the latest first, and whether requests are captured at all."""
    inspection = gateway_of(request).inspection
    moment = StatusSnapshot(time.monotonic(), time.time())
    kept = [_summary(each, moment) for each in reversed(inspection.kept if inspection else ())]
    return JsonResponse({"object": "list", "enabled": inspection is not None, "data": kept})


async def show_kept(request: Request) -> ASGIApp:
    """Return one captured request with its body and tokens; a worker tokenizes its prompt."""
    inspection = gateway_of(request).inspection
    kept = inspection.find(request.path_params["id"]) if inspection else None
    if kept is None:
        raise RequestError(
            Code.ROUTE_NOT_FOUND, f"No request `{request.path_params['id']}` has been captured."
        )
    dispatcher = gateway_of(request).dispatcher
    moment = StatusSnapshot(time.monotonic(), time.time())
    wanted = replace(
        kept.request,
        incarnation=dispatcher.incarnation,
        id="tokens-" + secrets.token_hex(12),
        tokenizing=TokenizeOptions(tokens=True),
    )
    renderer = tokens.TokenizeRenderer(lambda accepted: {**_summary(kept, moment), **_whole(kept, accepted)})
    target = dispatcher.choose(kept.flight.model)
    return respond(request, target, [wanted], list(kept.flight.media), renderer, prompts=1)


def _summary(kept: CapturedRequest, moment: StatusSnapshot) -> dict[str, Any]:
    flight = kept.flight
    return {
        "id": flight.id,
        "time": moment.unix(flight.opened_at),
        "path": kept.path,
        "model": flight.model,
        "code": code_of(flight) if flight.terminal else None,
        "prompt_tokens": flight.prompt_tokens,
        "answered": len(flight.tokens),
        "reuse": reuse_of(flight.reuse),
    }


def _whole(kept: CapturedRequest, accepted: Accepted) -> dict[str, Any]:
    body = kept.body.decode("utf-8", "replace")
    return {
        "body": body[:BODY_CHARACTERS_MAX],
        "images": len(kept.flight.media),
        "prompt": {"tokens": accepted.tokens},
        "answer": {"tokens": kept.flight.tokens},
    }


ROUTES = [
    Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
    Route("/v1/inspect", list_kept),
    Route("/v1/inspect/{id}", show_kept),
]
