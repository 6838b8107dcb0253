"""llama.cpp's streams that can be read on: by the client's conversation, from a byte on."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.chat import body
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests import streams
from broker.requests.answer_response import StreamCursor
from broker.requests.generation import whole_body
from broker.state import gateway_of
from protocol.errors import Code, RequestError


async def one(request: Request) -> ASGIApp:
    """Return the bytes of a conversation's latest stream behind those that the client has, or end it."""
    gateway, owner = gateway_of(request), context_of(request).owner
    id = request.path_params.get("id") or request.query_params.get("conv_id", "")
    if not id:
        raise RequestError(Code.INVALID_REQUEST, "'conv_id' is missing.", param="conv_id")
    answer = gateway.answers.find(owner, id, "conversation")
    if request.method == "DELETE":
        if answer is not None:
            gateway.answers.drop(answer)
        return Response(status_code=204)
    cursor = StreamCursor(nbytes=streams.number_in("from", request.query_params.get("from") or "0"))
    return streams.found(gateway, answer, id, cursor)


async def lookup(request: Request) -> Response:
    """List the streams of those conversations that the client names, each perhaps followed by `::model`."""
    wanted = body.read_lookup(await whole_body(request)).conversation_ids
    return JsonResponse(streams.listed(gateway_of(request), context_of(request).owner, wanted))


ROUTES = [
    Route("/v1/stream", one, methods=["GET", "DELETE"]),
    Route("/v1/stream/{id:path}", one, methods=["GET", "DELETE"]),
    Route("/v1/streams/lookup", lookup, methods=["POST"]),
]
