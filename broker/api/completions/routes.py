"""POST /v1/completions: the older text completion API."""

from __future__ import annotations

import secrets
import time
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.api.completions import completions
from broker.api.rendering import TextRendering
from broker.requests import streams
from broker.requests.generation import generated, take_body
from broker.requests.idempotency import keyed
from broker.state import gateway_of


async def complete_text(request: Request) -> ASGIApp:
    """Generate the continuation of each prompt, streamed or as one document."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, completions.read)
    target = gateway.dispatcher.choose(body.model, body.adapter)
    id = "cmpl-" + secrets.token_hex(12)
    generate = partial(completions.generate, body, id=id, incarnation=gateway.dispatcher.incarnation)
    requests = await gateway.offload.work(len(raw), generate)
    rendering = TextRendering(
        id=id,
        model=target.name,
        created=int(time.time()),
        stream=bool(body.stream),
        choices=len(requests),
        prompts=len(body.prompts),
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        echoes=completions.echoes(body),
    )
    return generated(request, target, requests, [], rendering, prompts=len(body.prompts))


ROUTES = [
    Route("/v1/completions", keyed(complete_text), methods=["POST"]),
    streams.route("/v1/completions", "cmpl-"),
]
