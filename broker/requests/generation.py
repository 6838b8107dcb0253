"""Shared code of the APIs that run a model: from a request body to a worker to a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.types import ASGIApp

from broker.answers.answer import DurableAnswer
from broker.api.rendering import ChatRendering, MessageRendering, TextRendering
from broker.dialects.normalize import Conversation
from broker.dialects.renderers import Renderer
from broker.dispatch.fleet import UnloadedModel, Worker
from broker.dispatch.flight import Flight
from broker.middleware.ids import request_id
from broker.middleware.limits import KeyConcurrency
from broker.requests import access_log, durable
from broker.requests.batch_lines import CLIENT, is_batch_line
from broker.requests.clients import client_of
from broker.requests.durable import Described, fingerprint, open_flights
from broker.requests.media import read_media
from broker.requests.reattach import AnswerResponse
from broker.requests.respond import GenerationResponse, read_body
from broker.requests.submission import Submission, check_room
from broker.state import gateway_of, prefix_namespace_of
from protocol.adapters import SEPARATOR
from protocol.common.api_keys import ApiKey
from protocol.messages import Generate
from protocol.messages import Request as Asked
from protocol.prefix_namespace import salt_in
from protocol.tasks import require, task_of
from protocol.types import BATCH_PRIORITY, Media

T = TypeVar("T")

Within = Callable[[AbstractContextManager[Sequence[Flight]]], AbstractContextManager[Sequence[Flight]]]


def same(flights: AbstractContextManager[Sequence[Flight]]) -> AbstractContextManager[Sequence[Flight]]:
    """Return the flights' context itself, as a `Within`."""
    return flights


async def take_body(
    request: Request, read: Callable[[bytes], T], may_wait: Callable[[bytes], bool] | None = None
) -> tuple[T, bytes]:
    """Return the body parsed by `read`, and its bytes.

    Raises `RequestError`, before any of the body is read if the server is at capacity. `may_wait`: returns
    whether a request with this body may be queued then; it is read first.
    """
    gateway = gateway_of(request)
    is_limited = not is_batch_line(request)
    if is_limited and may_wait is None:
        check_room(gateway.dispatcher)
    raw = await whole_body(request)
    if is_limited and may_wait is not None and not may_wait(raw):
        check_room(gateway.dispatcher)
    if gateway.inspection is not None:
        request.state.body = raw
    return await gateway.offload.work(len(raw), partial(read, raw)), raw


async def whole_body(request: Request) -> bytes:
    """Return the body's bytes, read now or before. Raises `RequestError` if they are too many."""
    kept: bytes | None = getattr(request.state, "body", None)
    return await read_body(request, gateway_of(request).settings.body_bytes_max) if kept is None else kept


def choose(request: Request, model: str | None, adapter: str | None = None) -> Worker | UnloadedModel:
    """Return the worker for a request that names a model, and may name an adapter. Raises `RequestError`."""
    found, request.state.adapter = gateway_of(request).dispatcher.find_with_adapter(model, adapter)
    return found


def answering(request: Request, found: Worker | UnloadedModel) -> str:
    """Return the name of what answers the request: the model, or MODEL:ADAPTER."""
    adapter = _adapter_of(request)
    return f"{found.model}{SEPARATOR}{adapter}" if adapter else found.model


def _adapter_of(request: Request) -> str:
    adapter: str = getattr(request.state, "adapter", "")
    return adapter


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


def generated(
    request: Request,
    found: Worker | UnloadedModel,
    requests: Sequence[Asked],
    frames: list[bytes],
    rendering: ChatRendering | TextRendering | MessageRendering,
    *,
    prompts: int = 1,
) -> ASGIApp:
    """Return the response that `rendering` renders over the flights of `requests`; otherwise as `respond`."""
    renderer = rendering.renderer(partial(fingerprint, gateway_of(request), found.model))
    described = Described(rendering)
    return respond(request, found, requests, frames, renderer, prompts=prompts, described=described)


def respond(
    request: Request,
    found: Worker | UnloadedModel,
    requests: Sequence[Asked],
    frames: list[bytes],
    renderer: Renderer,
    *,
    prompts: int,
    within: Within = same,
    described: Described | None = None,
) -> ASGIApp:
    """Return the response over the flights of `requests`, equally many per prompt, with media `frames`.

    `within`: wraps the context of the flights. `described`: what a journal needs to render it again. Raises
    `RequestError` if the model cannot perform the task.
    """
    requests = configured(request, found, requests)
    flights = within(submission(request, found, requests, frames))
    keepalive_s = gateway_of(request).settings.keepalive_s
    on_end = end_logger(request)
    answer: DurableAnswer | None = getattr(request.state, "answer", None)
    if answer is None:
        return GenerationResponse(flights, renderer, prompts=prompts, keepalive_s=keepalive_s, on_end=on_end)
    answer.own_bytes = len(getattr(request.state, "body", b"")) + sum(map(len, frames))
    open_flights(answer, renderer, flights, on_end, prompts=prompts)
    if described is not None:
        durable.record(gateway_of(request), answer, described, requests, frames, found.model, prompts=prompts)
    return AnswerResponse(answer, keepalive_s)


def configured(request: Request, found: Worker | UnloadedModel, requests: Sequence[Asked]) -> Sequence[Asked]:
    """Return the requests as they are admitted. Raises `RequestError` if the model cannot do the task."""
    gateway = gateway_of(request)
    require(task_of(requests[0]), found.capabilities, found.model)
    key: ApiKey | None = getattr(request.state, "key", None)
    namespace = prefix_namespace_of(request)
    max_tokens, adapter = gateway.settings.max_tokens_default, _adapter_of(request)
    requests = [_configured(each, namespace, max_tokens, adapter) for each in requests]
    if gateway.settings.log_prompts:
        access_log.log_prompts(requests)
    client = client_of(key, request.client.host if request.client else "")
    if is_batch_line(request):
        return [structs.replace(each, client=CLIENT, priority=BATCH_PRIORITY) for each in requests]
    return [structs.replace(each, client=client) for each in requests]


def submission(
    request: Request, found: Worker | UnloadedModel, requests: Sequence[Asked], frames: list[bytes]
) -> AbstractContextManager[Sequence[Flight]]:
    """Return the context in which the flights of a client's requests are open."""
    gateway = gateway_of(request)
    key: ApiKey | None = getattr(request.state, "key", None)
    limits = Submission(gateway.dispatcher, gateway.key_concurrency, gateway.settings.queue_timeout_s)
    if is_batch_line(request):
        limits = Submission(gateway.dispatcher, KeyConcurrency(), None)
    flights = limits.submit(key, found, requests, frames)
    if gateway.inspection is None:
        return flights
    return gateway.inspection.keeping(request.url.path, getattr(request.state, "body", b""), flights)


def end_logger(request: Request) -> Callable[[Flight, int], None]:
    """Return the function that logs the end of a flight of this request, with a status."""
    key: ApiKey | None = getattr(request.state, "key", None)
    return partial(access_log.log_end, request_id(request.scope), key.name if key else "")


def _configured(request: Asked, namespace: str, max_tokens_default: int | None, adapter: str) -> Asked:
    """Return the request with its adapter, its salt in a namespace of the prefix cache, and a maximum of
    tokens."""
    if not isinstance(request, Generate):
        return request  # it uses no cache
    max_tokens = max_tokens_default if request.max_tokens is None else request.max_tokens
    salt = salt_in(namespace, request.cache_salt)
    return structs.replace(request, adapter=adapter, cache_salt=salt, max_tokens=max_tokens)
