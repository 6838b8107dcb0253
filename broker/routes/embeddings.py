"""POST /v1/embeddings."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects import embeddings
from broker.routes.generation import respond, take_body
from broker.routes.state import gateway_of


async def embed(request: Request) -> ASGIApp:
    """Return an embedding vector for each text."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, embeddings.read)
    found = gateway.dispatcher.find(body.model, "embed")
    id = "embd-" + secrets.token_hex(12)
    message = partial(embeddings.embed, body, id=id, incarnation=gateway.dispatcher.incarnation)
    asked = await gateway.offload.work(len(raw), message)
    return respond(request, found, [asked], [], embeddings.EmbeddingsRenderer(found.model, body), prompts=1)


ROUTES = [Route("/v1/embeddings", embed, methods=["POST"])]
