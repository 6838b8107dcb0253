"""POST /v1/completions: the older text completion API."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.dialects import completions
from broker.routes.generation import renderer, respond, take_body
from broker.routes.state import gateway_of


async def complete_text(request: Request) -> ASGIApp:
    """Generate the continuation of each prompt, streamed or as one document."""
    gateway = gateway_of(request)
    body, raw = await take_body(request, completions.read)
    found = gateway.dispatcher.find(body.model)
    id = "cmpl-" + secrets.token_hex(12)
    generate = partial(completions.generate, body, id=id, incarnation=gateway.dispatcher.incarnation)
    requests = await gateway.offload.work(len(raw), generate)
    rendered = renderer(
        gateway,
        found.model,
        id,
        "text_completion",
        completions.CompletionChoiceRenderer(
            logprobs=body.logprobs is not None, choices=len(requests), echoes=completions.echoes(body)
        ),
        body,
        choices=len(requests),
        prompts=len(body.prompts),
    )
    return respond(request, found, requests, [], rendered, prompts=len(body.prompts))


ROUTES = [Route("/v1/completions", complete_text, methods=["POST"])]
