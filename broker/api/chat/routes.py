"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.rendering import ChatRendering
from broker.dialects.parameters import copies
from broker.dispatch.fleet import Target
from broker.middleware.context import RequestContext, context_of
from broker.requests import streams
from broker.requests.generation import ask, generated, take_body
from broker.requests.idempotency import keyed
from broker.state import GatewayState, gateway_of
from protocol.messages import Generate


async def complete_chat(request: Request) -> ASGIApp:
    """Generate the next message of a conversation, streamed or as one document."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, chat_body.read)
    target = gateway.dispatcher.choose(body.model, body.adapter)
    id = "chatcmpl-" + secrets.token_hex(12)
    first, frames = await ask_chat(gateway, context_of(request), target, body, len(raw), id)
    requests = copies(first, body.n or 1)
    rendering = ChatRendering(
        id=id,
        model=target.name,
        created=int(time.time()),
        stream=bool(body.stream),
        choices=len(requests),
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
        functions=body.has_functions,
        customs=body.customs,
    )
    return generated(request, target, requests, frames, rendering)


async def ask_chat(
    gateway: GatewayState,
    context: RequestContext,
    target: Target,
    body: chat_body.Body,
    body_bytes: int,
    id: str,
) -> tuple[Generate, list[bytes]]:
    """Return the request for the first choice, and its media. Raises `RequestError`."""
    converse = partial(chat.conversation, body, system_in_place=target.capabilities.system_in_place)
    generate = partial(chat.generate, body, id=id, incarnation=gateway.dispatcher.incarnation)
    return await ask(gateway, context, target, body_bytes, converse, generate)


ROUTES = [
    Route("/v1/chat/completions", keyed(complete_chat), methods=["POST"]),
    streams.route("/v1/chat/completions", "chatcmpl-"),
]
