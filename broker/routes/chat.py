"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects import chat, chat_body
from broker.dialects.parameters import copies
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.routes.generation import ask, renderer, respond, take_body
from broker.routes.state import gateway_of
from protocol.messages import Generate


async def complete_chat(request: Request) -> ASGIApp:
    """Generate the next message of a conversation, streamed or as one document."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, chat_body.read)
    found = gateway.dispatcher.find(body.model)
    id = "chatcmpl-" + secrets.token_hex(12)
    first, frames = await ask_chat(request, body, len(raw), found, id)
    requests = copies(first, body.n or 1)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    rendered = renderer(
        gateway,
        found.model,
        id,
        kind,
        chat.ChatChoiceRenderer(logprobs=bool(body.logprobs), functions=body.has_functions),
        body,
        choices=len(requests),
    )
    return respond(request, found, requests, frames, rendered, prompts=1)


async def ask_chat(
    request: Request, body: chat_body.Body, body_bytes: int, found: Worker | UnloadedModel, id: str
) -> tuple[Generate, list[bytes]]:
    """Return the request for the first choice, and its media. Raises `RequestError`."""
    incarnation = gateway_of(request).dispatcher.incarnation
    in_place = found.capabilities.system_in_place
    converse = partial(chat.conversation, body, system_in_place=in_place)
    generate = partial(chat.generate, body, id=id, incarnation=incarnation)
    return await ask(request, found, body_bytes, converse, generate)


ROUTES = [Route("/v1/chat/completions", complete_chat, methods=["POST"])]
