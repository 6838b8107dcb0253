"""POST /v1/embeddings and /v1/rerank, with the other paths that clients use for the latter."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.embeddings import embeddings, rerank
from broker.dispatch.fleet import Target
from broker.requests.generation import respond, take_body
from broker.state import gateway_of


async def embed(request: Request) -> ASGIApp:
    """Return an embedding vector for each text."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, embeddings.read)
    target = Target(gateway.dispatcher.find(body.model, "embed"))
    id = "embd-" + secrets.token_hex(12)
    message = partial(embeddings.embed, body, id=id, incarnation=gateway.dispatcher.incarnation)
    asked = await gateway.offload.work(len(raw), message)
    renderer = embeddings.EmbeddingsRenderer(target.model, body)
    return respond(request, target, [asked], [], renderer, prompts=1)


async def rank(request: Request) -> ASGIApp:
    """Rank documents by their relevance to a query."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, rerank.read)
    target = Target(gateway.dispatcher.find(body.model, "rerank"))
    id = "rerank-" + secrets.token_hex(12)
    message = partial(rerank.rank, body, id=id, incarnation=gateway.dispatcher.incarnation)
    asked = await gateway.offload.work(len(raw), message)
    return respond(request, target, [asked], [], rerank.RerankRenderer(id, target.model, body), prompts=1)


ROUTES = [
    Route("/v1/embeddings", embed, methods=["POST"]),
    *(Route(path, rank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
]
