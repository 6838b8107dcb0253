"""Shared code of the APIs that run a model: from a request body to a worker to a response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.types import ASGIApp

from broker.dialects import answer
from broker.dialects.normalize import Conversation
from broker.dialects.parameters import Parameters
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.http import access_log
from broker.http.clients import client_of
from broker.http.ids import request_id
from broker.http.respond import GenerationResponse, Renderer, read_body
from broker.http.submission import Submission, check_room
from broker.routes.media import read_media
from broker.routes.report import version
from broker.routes.state import GatewayState, gateway_of, prefix_namespace_of
from protocol.api_keys import ApiKey
from protocol.messages import Generate
from protocol.messages import Request as Asked
from protocol.prefix_namespace import salt_in
from protocol.tasks import require, task_of
from protocol.types import Media

T = TypeVar("T")


async def take_body(request: Request, read: Callable[[bytes], T]) -> tuple[T, bytes]:
    """Return the body parsed by `read`, and its bytes.

    Raises `RequestError`, before any of the body is read if the server is at capacity.
    """
    gateway = gateway_of(request)
    check_room(gateway.dispatcher)
    raw = await read_body(request, gateway.settings.body_bytes_max)
    if gateway.inspection is not None:
        request.state.body = raw
    return await gateway.offload.work(len(raw), partial(read, raw)), raw


async def ask(
    request: Request,
    found: Worker | UnloadedModel,
    body_bytes: int,
    converse: Callable[[], Conversation],
    generate: Callable[[list[dict[str, Any]], list[Media]], Generate],
) -> tuple[Generate, list[bytes]]:
    """Return the request to the worker and its media's bytes, built by a dialect's `converse` and `generate`.

    Raises `RequestError`.
    """
    work = gateway_of(request).offload.work
    conversation = await work(body_bytes, converse)
    media, frames = await read_media(request, conversation.attachments, found)
    return await work(body_bytes, partial(generate, conversation.messages, media)), frames


def renderer(
    gateway: GatewayState,
    model: str,
    id: str,
    kind: str,
    form: answer.ChoiceRenderer,
    body: Parameters,
    *,
    choices: int,
    prompts: int = 1,
) -> Renderer:
    """Return the renderer of an OpenAI response, streamed or as one document. `kind`: its `object`."""
    head = {"id": id, "object": kind, "created": int(time.time()), "model": model}

    def envelope() -> dict[str, Any]:
        return head | {"system_fingerprint": _fingerprint(gateway, model)}

    if not body.stream:
        return answer.ChoiceDocumentRenderer(envelope, form, choices=choices, prompts=prompts)
    return answer.ChoiceSseRenderer(
        envelope, form, choices=choices, prompts=prompts, include_usage=body.include_usage
    )


def _fingerprint(gateway: GatewayState, model: str) -> str:
    """Return OpenAI's `system_fingerprint`, which changes with the model's weights and our version."""
    entry = gateway.dispatcher.fleet.models.get(model)
    identity = entry.last.identity if entry and entry.last else ""
    digest = sha256("\n".join((version(), model, identity)).encode()).hexdigest()
    return f"fp_{digest[:10]}"


def respond(
    request: Request,
    found: Worker | UnloadedModel,
    requests: Sequence[Asked],
    frames: list[bytes],
    renderer: Renderer,
    *,
    prompts: int,
) -> ASGIApp:
    """Return the response over the flights of `requests`, equally many per prompt, with media `frames`.

    Raises `RequestError` if the model cannot perform the task.
    """
    gateway = gateway_of(request)
    require(task_of(requests[0]), found.capabilities, found.model)
    key: ApiKey | None = getattr(request.state, "key", None)
    namespace = prefix_namespace_of(request)
    requests = [_configured(each, namespace, gateway.settings.max_tokens_default) for each in requests]
    if gateway.settings.log_prompts:
        access_log.log_prompts(requests)
    client = client_of(key, request.client.host if request.client else "")
    requests = [structs.replace(each, client=client) for each in requests]
    submission = Submission(gateway.dispatcher, gateway.key_concurrency, gateway.settings.queue_timeout_s)
    flights = submission.submit(key, found, requests, frames)
    if gateway.inspection is not None:
        body = getattr(request.state, "body", b"")
        flights = gateway.inspection.keeping(request.url.path, body, flights)
    return GenerationResponse(
        flights,
        renderer,
        prompts=prompts,
        keepalive_s=gateway.settings.keepalive_s,
        on_end=partial(access_log.log_end, request_id(request.scope), key.name if key else ""),
    )


def _configured(request: Asked, namespace: str, max_tokens_default: int | None) -> Asked:
    """Return the request with its salt in a namespace of the prefix cache, and a maximum of tokens."""
    if not isinstance(request, Generate):
        return request  # it uses no cache
    max_tokens = max_tokens_default if request.max_tokens is None else request.max_tokens
    salt = salt_in(namespace, request.cache_salt)
    return structs.replace(request, cache_salt=salt, max_tokens=max_tokens)
