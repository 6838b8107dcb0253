"""Shared code of the APIs that run a model: from a request body to a worker to a response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.types import ASGIApp

from broker.answers.answer import Answer
from broker.answers.open_flights import OpenFlights
from broker.api.rendering import ChatRendering, MessageRendering, TextRendering
from broker.dialects.normalize import Conversation
from broker.dialects.renderers import Renderer
from broker.dialects.sessions import SessionName
from broker.dispatch.admission import has_begun
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Target, UnloadedModel, Worker
from broker.dispatch.flight import Flight
from broker.middleware.context import RequestContext, context_of, update_context
from broker.middleware.limits import KeyConcurrency
from broker.requests import access_log, durable, streams
from broker.requests.answer_response import AnswerResponse
from broker.requests.durable import Described, fingerprint
from broker.requests.media import read_media
from broker.requests.opening_headers import opening_headers
from broker.requests.request_body import read_body
from broker.state import GatewayState, gateway_of, scheduler
from protocol.common.api_keys import ApiKey
from protocol.errors import RequestError
from protocol.messages import Generate
from protocol.messages import Request as Asked
from protocol.prefix_namespace import salt_in
from protocol.tasks import require, task_of
from protocol.types import BATCH_PRIORITY, Media

T = TypeVar("T")


async def take_body(
    request: Request, read: Callable[[bytes], T], may_wait: Callable[[bytes], bool] | None = None
) -> tuple[T, bytes]:
    """Return the body parsed by `read`, and its bytes.

    Raises `RequestError`, before any of the body is read if the server is at capacity. `may_wait`: returns
    whether a request with this body may be queued then; it is read first.
    """
    gateway, context = gateway_of(request), context_of(request)
    is_limited = not context.is_batch_line
    if is_limited and may_wait is None:
        check_room(gateway.dispatcher)
    raw = await whole_body(request)
    if is_limited and may_wait is not None and not may_wait(raw):
        check_room(gateway.dispatcher)
    if gateway.inspection is not None:
        update_context(request, body=raw, answer=context.answer)
    return await gateway.offload.work(len(raw), partial(read, raw)), raw


async def whole_body(request: Request) -> bytes:
    """Return the body's bytes, read now or before. Raises `RequestError` if they are too many."""
    body = context_of(request).body
    return await read_body(request, gateway_of(request).settings.body_bytes_max) if body is None else body


async def ask(
    gateway: GatewayState,
    context: RequestContext,
    target: Target,
    body_bytes: int,
    converse: Callable[[], Conversation],
    generate: Callable[[list[dict[str, Any]], list[Media]], Generate],
) -> tuple[Generate, list[bytes]]:
    """Return the request to the worker and its media's bytes, built by a dialect's `converse` and `generate`.

    Raises `RequestError`.
    """
    work = gateway.offload.work
    conversation = await work(body_bytes, converse)
    media, frames = await read_media(gateway, context.media, conversation.attachments, target)
    return await work(body_bytes, partial(generate, conversation.messages, media)), frames


def generated(
    request: Request,
    target: Target,
    requests: Sequence[Asked],
    frames: list[bytes],
    rendering: ChatRendering | TextRendering | MessageRendering,
    *,
    prompts: int = 1,
) -> ASGIApp:
    """Return the response that `rendering` renders over the flights of `requests`; otherwise as `respond`."""
    renderer = rendering.renderer(partial(fingerprint, gateway_of(request), target.model))
    described = Described(rendering)
    with streams.kept(request, rendering):
        return respond(request, target, requests, frames, renderer, prompts=prompts, described=described)


def respond(
    request: Request,
    target: Target,
    requests: Sequence[Asked],
    frames: list[bytes],
    renderer: Renderer,
    *,
    prompts: int,
    described: Described | None = None,
) -> AnswerResponse:
    """Open the flights of `requests`, equally many per prompt, with media `frames`, and return the response.

    `described`: what a journal needs to render it again. Raises `RequestError` if the model cannot perform
    the task, or the request is not admitted.
    """
    gateway, context = gateway_of(request), context_of(request)
    requests = configured(gateway, context, target, requests)
    answer = context.answer or Answer(scheduler())
    open_flights(request, target, requests, frames, answer, renderer, prompts=prompts)
    answer.nbytes += len(context.body or b"") + sum(map(len, frames))
    if answer.is_durable and described is not None:
        durable.record(gateway, answer, described, requests, frames, target.model, prompts=prompts)
    return AnswerResponse(answer, gateway.settings.keepalive_s)


def configured(
    gateway: GatewayState, context: RequestContext, target: Target, requests: Sequence[Asked]
) -> Sequence[Asked]:
    """Return the requests as they are admitted. Raises `RequestError` if the model cannot do the task."""
    require(task_of(requests[0]), target.capabilities, target.model)
    settings, namespace = gateway.settings, gateway.prefix_namespace(context)
    shared: dict[str, Any] = {"client": context.client}
    if context.is_batch_line:
        shared["priority"] = BATCH_PRIORITY

    def admitted(each: Asked) -> Asked:
        if not isinstance(each, Generate):
            return structs.replace(each, **shared)  # it uses no cache
        max_tokens = settings.max_tokens_default if each.max_tokens is None else each.max_tokens
        name = context.session if context.session.session else SessionName(each.session)
        name = name.within(namespace)
        return structs.replace(
            each,
            adapter=target.adapter,
            cache_salt=salt_in(namespace, each.cache_salt),
            max_tokens=max_tokens,
            session=name.session,
            parent_session=name.parent,
            **shared,
        )

    requests = [admitted(each) for each in requests]
    if settings.log_prompts:
        access_log.log_prompts(requests)
    return requests


def open_flights(
    request: Request,
    target: Target,
    requests: Sequence[Asked],
    frames: list[bytes],
    answer: Answer,
    renderer: Renderer,
    *,
    prompts: int = 1,
) -> None:
    """Submit a client's requests, and let the answer read their flights. Raises `RequestError`."""
    gateway, context = gateway_of(request), context_of(request)
    limits = Submission(gateway.dispatcher, gateway.key_concurrency, gateway.settings.queue_timeout_s)
    if context.is_batch_line:
        limits = Submission(gateway.dispatcher, KeyConcurrency(), None)
    flights: AbstractContextManager[Sequence[Flight]]
    flights = limits.submit(context.key, target.worker, requests, frames, answer.refuse)
    if gateway.inspection is not None:
        flights = gateway.inspection.keeping(request.url.path, context.body or b"", flights)
    on_end = partial(access_log.log_end, context.id, context.key.name if context.key else "")
    opening = partial(opening_headers, prompts)
    answer.open(OpenFlights(flights, opening=opening, on_end=on_end), renderer)


# Submission of requests to the dispatcher, with the concurrency limit per key and the queue timeout.


def check_room(dispatcher: Dispatcher) -> None:
    """Raise `RequestError(text_generation_busy)` if every request would be rejected, before reading the body.

    A model without a worker counts as having room.
    """
    fleet = dispatcher.fleet
    serving = [(worker, worker.ready) for worker in fleet if worker.serves and worker.ready is not None]
    if not serving or {worker.model for worker, _ in serving} != fleet.models.keys():
        return
    if len(dispatcher.flights) < min(ready.running_max for _, ready in serving):
        return
    present = {worker: dispatcher.present(worker) for worker, _ in serving}
    if all(dispatcher.admission.is_full(present[worker], ready) for worker, ready in serving):
        raise dispatcher.admission.busy(max(present.values(), key=len))


@dataclass(frozen=True, slots=True)
class Submission:
    """Wrapper of `Dispatcher.submit` that enforces the limits. `queue_timeout_s`: None for no timeout."""

    dispatcher: Dispatcher
    key_concurrency: KeyConcurrency
    queue_timeout_s: float | None

    @contextmanager
    def submit(
        self,
        key: ApiKey | None,
        found: Worker | UnloadedModel,
        requests: Sequence[Asked],
        media: Sequence[bytes],
        refuse: Callable[[RequestError], None],
    ) -> Iterator[list[Flight]]:
        """Submit all requests of one client, or none. On the event loop.

        `refuse`: called if none of them begins in time. Raises `RequestError`.
        """
        admission = self.dispatcher.admission
        held = self.key_concurrency.held(key, len(requests), admission.retry_after_s)
        with held, self.dispatcher.submit(found, requests, media) as flights:
            for flight in flights:
                flight.key = key.name if key else ""
            timer = None
            if self.queue_timeout_s is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self.queue_timeout_s, self._end_wait, found.model, flights, refuse)
            try:
                yield flights
            finally:
                if timer is not None:
                    timer.cancel()

    def _end_wait(
        self, model: str, flights: Sequence[Flight], refuse: Callable[[RequestError], None]
    ) -> None:
        """Refuse the request, unless one of its flights has begun or ended."""
        if any(has_begun(flight) or flight.terminal is not None for flight in flights):
            return
        open = (flight for flight in self.dispatcher.flights if flight.terminal is None)
        assigned = [flight for flight in open if flight.model == model]
        why = f"The server did not start this request within {self.queue_timeout_s:g} s"
        refusal = self.dispatcher.admission.busy(assigned, why)
        refuse(refusal)
        for flight in flights:
            self.dispatcher.give_up(flight, refusal.code, refusal.message)
