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
from broker.middleware.context import context_of
from broker.requests.generation import respond, take_body
from broker.state import GatewayState, gateway_of
from protocol.messages import Accepted, Generate


async def tokenize(request: Request) -> ASGIApp:
    """Return the tokens of a text, or of a conversation rendered for its model."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, tokens.read_tokenize)
    target = gateway.dispatcher.choose(body.model)
    if body.is_chat:
        chat = await gateway.offload.work(len(raw), partial(chat_body.read, raw))
        asked, frames = await ask_chat(gateway, context_of(request), target, chat, len(raw), _new_id())
    else:
        asked, frames = _unprompted(gateway), []

    def document(accepted: Accepted) -> dict[str, object]:
        known = gateway.dispatcher.fleet.models[target.model]
        pieces = bool(body.return_token_strs)
        return tokens.tokenized(accepted, context_length=known.context_length, pieces=pieces)

    wanted = tokens.tokenize(body, asked)
    return respond(request, target, [wanted], frames, tokens.TokenizeRenderer(document), prompts=1)


async def detokenize(request: Request) -> ASGIApp:
    """Return the text of tokens."""
    gateway = gateway_of(request)
    body, _ = await take_body(request, tokens.read_detokenize)
    target = gateway.dispatcher.choose(body.model)
    wanted = tokens.detokenize(body, _unprompted(gateway))
    renderer = tokens.TokenizeRenderer(lambda accepted: {"prompt": accepted.prompt})
    return respond(request, target, [wanted], [], renderer, prompts=1)


def _unprompted(gateway: GatewayState) -> Generate:
    return tokens.unprompted(id=_new_id(), incarnation=gateway.dispatcher.incarnation)


def _new_id() -> str:
    return "tokens-" + secrets.token_hex(12)


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
