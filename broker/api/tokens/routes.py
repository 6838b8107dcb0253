"""POST /tokenize and /detokenize, as in vLLM. They do not wait for running requests."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.chat import body as chat_body
from broker.api.chat.routes import ask_chat
from broker.api.tokens import tokens
from broker.requests.generation import choose, respond, take_body
from broker.state import GatewayState, gateway_of
from protocol.messages import Accepted, Generate


async def tokenize(request: Request) -> ASGIApp:
    """Return the tokens of a text, or of a conversation rendered for its model."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, tokens.read_tokenize)
    found = choose(request, body.model)
    if body.is_chat:
        chat = await gateway.offload.work(len(raw), partial(chat_body.read, raw))
        asked, frames = await ask_chat(request, chat, len(raw), found, _new_id())
    else:
        asked, frames = _unprompted(gateway), []

    def document(told: Accepted) -> dict[str, object]:
        known = gateway.dispatcher.fleet.models[found.model]
        pieces = bool(body.return_token_strs)
        return tokens.tokenized(told, context_length=known.context_length, pieces=pieces)

    wanted = tokens.tokenize(body, asked)
    return respond(request, found, [wanted], frames, tokens.TokenizeRenderer(document), prompts=1)


async def detokenize(request: Request) -> ASGIApp:
    """Return the text of tokens."""
    gateway = gateway_of(request)
    body, _ = await take_body(request, tokens.read_detokenize)
    found = choose(request, body.model)
    wanted = tokens.detokenize(body, _unprompted(gateway))
    renderer = tokens.TokenizeRenderer(lambda told: {"prompt": told.prompt})
    return respond(request, found, [wanted], [], renderer, prompts=1)


def _unprompted(gateway: GatewayState) -> Generate:
    return tokens.unprompted(id=_new_id(), incarnation=gateway.dispatcher.incarnation)


def _new_id() -> str:
    return "tokens-" + secrets.token_hex(12)


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
