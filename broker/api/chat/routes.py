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
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.requests.generation import answering, ask, choose, generated, take_body
from broker.requests.idempotency import keyed
from broker.state import gateway_of
from protocol.messages import Generate


async def complete_chat(request: Request) -> ASGIApp:
    """Generate the next message of a conversation, streamed or as one document."""
    body, raw = await take_body(request, chat_body.read)
    found = choose(request, body.model, body.adapter)
    id = "chatcmpl-" + secrets.token_hex(12)
    first, frames = await ask_chat(request, body, len(raw), found, id)
    requests = copies(first, body.n or 1)
    rendering = ChatRendering(
        id=id,
        model=answering(request, found),
        created=int(time.time()),
        stream=bool(body.stream),
        choices=len(requests),
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
        functions=body.has_functions,
        customs=body.customs,
    )
    return generated(request, found, requests, frames, rendering)


async def ask_chat(
    request: Request, body: chat_body.Body, body_bytes: int, found: Worker | UnloadedModel, id: str
) -> tuple[Generate, list[bytes]]:
    """Return the request for the first choice, and its media. Raises `RequestError`."""
    incarnation = gateway_of(request).dispatcher.incarnation
    in_place = found.capabilities.system_in_place
    converse = partial(chat.conversation, body, system_in_place=in_place)
    generate = partial(chat.generate, body, id=id, incarnation=incarnation)
    return await ask(request, found, body_bytes, converse, generate)


ROUTES = [Route("/v1/chat/completions", keyed(complete_chat), methods=["POST"])]
