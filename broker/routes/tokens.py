"""POST /tokenize and /detokenize, as vLLM has them. They wait for nothing that runs."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects import chat, chat_body, tokens
from broker.dispatch.fleet import Vacancy, Worker
from broker.http.boarding import check_room
from broker.http.respond import read_body
from broker.routes.gateway import Gateway, gateway_of
from broker.routes.generation import read_images, respond
from protocol.messages import Accepted, Generate


async def tokenize(request: Request) -> ASGIApp:
    """The tokens of a text, or of a conversation as its model would be given it."""
    gateway = gateway_of(request)
    check_room(gateway.dispatcher)
    raw = await read_body(request, gateway.settings.body_bytes_max)
    body = tokens.read_tokenize(raw)
    found = gateway.dispatcher.find(body.model)
    asked, frames = _of_chat(gateway, raw, found) if body.is_chat else (_unprompted(gateway), [])

    def document(told: Accepted) -> dict[str, object]:
        known = gateway.dispatcher.fleet.models[found.model]
        pieces = bool(body.return_token_strs)
        return tokens.tokenized(told, context_length=known.context_length, pieces=pieces)

    wanted = tokens.tokenize(body, asked)
    return respond(request, found, [wanted], frames, tokens.Counted(document), prompts=1)


async def detokenize(request: Request) -> ASGIApp:
    """The text of tokens."""
    gateway = gateway_of(request)
    check_room(gateway.dispatcher)
    body = tokens.read_detokenize(await read_body(request, gateway.settings.body_bytes_max))
    found = gateway.dispatcher.find(body.model)
    wanted = tokens.detokenize(body, _unprompted(gateway))
    renderer = tokens.Counted(lambda told: {"prompt": told.prompt})
    return respond(request, found, [wanted], [], renderer, prompts=1)


def _unprompted(gateway: Gateway) -> Generate:
    return tokens.unprompted(id=_new_id(), incarnation=gateway.dispatcher.incarnation)


def _of_chat(gateway: Gateway, raw: bytes, found: Worker | Vacancy) -> tuple[Generate, list[bytes]]:
    """What chat would ask its worker, and the images' bytes."""
    body = chat_body.read(raw)
    conversation = chat.conversation(body, system_in_place=found.capabilities.system_in_place)
    media, frames = read_images(conversation.images, found, gateway.settings.media_bytes_max)
    incarnation = gateway.dispatcher.incarnation
    return chat.generate(body, conversation.messages, media, id=_new_id(), incarnation=incarnation), frames


def _new_id() -> str:
    return "tokens-" + secrets.token_hex(12)


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
