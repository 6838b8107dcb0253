"""What the APIs that ask a model have in common: from requests to a worker to a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from broker.dialects import answer
from broker.dialects.normalize import Conversation
from broker.dialects.parameters import Parameters
from broker.dispatch.fleet import Vacancy, Worker
from broker.http import accounts
from broker.http.auth import Key
from broker.http.boarding import Boarding, check_room
from broker.http.ids import request_id
from broker.http.respond import FlightResponse, Renderer, read_body
from broker.routes.gateway import gateway_of
from broker.routes.media import read_media
from protocol.messages import Generate
from protocol.messages import Request as Asked
from protocol.parts import Media
from protocol.tasks import require, task_of

T = TypeVar("T")


async def take_body(request: Request, read: Callable[[bytes], T]) -> tuple[T, bytes]:
    """The body as `read` makes it of its bytes, and these. Raises `RequestError`: at once where there is no
    room for the request, before any of it is read."""
    gateway = gateway_of(request)
    check_room(gateway.dispatcher)
    raw = await read_body(request, gateway.settings.body_bytes_max)
    if gateway.inspection is not None:
        request.state.body = raw
    return await gateway.aside.work(len(raw), partial(read, raw)), raw


async def ask(
    request: Request,
    found: Worker | Vacancy,
    body_bytes: int,
    converse: Callable[[], Conversation],
    generate: Callable[[list[dict[str, Any]], list[Media]], Generate],
) -> tuple[Generate, list[bytes]]:
    """What a worker is asked, and its media's bytes, by what a dialect makes of a body. Raises
    `RequestError`."""
    work = gateway_of(request).aside.work
    conversation = await work(body_bytes, converse)
    media, frames = await read_media(request, conversation.attachments, found)
    return await work(body_bytes, partial(generate, conversation.messages, media)), frames


def renderer(
    envelope: dict[str, object], form: answer.Form, body: Parameters, *, choices: int, prompts: int = 1
) -> Renderer:
    """For an answer as OpenAI's APIs give it, streamed or whole."""
    if not body.stream:
        return answer.Whole(envelope, form, choices=choices, prompts=prompts)
    return answer.Stream(envelope, form, choices=choices, prompts=prompts, include_usage=body.include_usage)


def respond(
    request: Request,
    found: Worker | Vacancy,
    requests: Sequence[Asked],
    frames: list[bytes],
    renderer: Renderer,
    *,
    prompts: int,
) -> ASGIApp:
    """The response over the flights of `requests`, as many for each of the `prompts`, with media `frames`.

    Raises `RequestError` where the model that was found is not made for what they ask.
    """
    gateway = gateway_of(request)
    require(task_of(requests[0]), found.capabilities, found.model)
    key: Key | None = getattr(request.state, "key", None)
    if gateway.settings.log_prompts:
        accounts.tell_prompts(requests)
    boarding = Boarding(gateway.dispatcher, gateway.shares, gateway.settings.queue_timeout_s)
    boarded = boarding.board(key, found, requests, frames)
    if gateway.inspection is not None:
        body = getattr(request.state, "body", b"")
        boarded = gateway.inspection.keeping(request.url.path, body, boarded)
    return FlightResponse(
        boarded,
        renderer,
        prompts=prompts,
        keepalive_s=gateway.settings.keepalive_s,
        on_end=partial(accounts.tell_end, request_id(request.scope), key.name if key else ""),
    )
