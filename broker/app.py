"""Routes and lifespan. What happens behind a route is elsewhere: `dialects`, `dispatch`, `respond`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from broker import status
from broker.config import GatewaySettings
from broker.dialects import answer, chat, chat_body, completions
from broker.dialects.media import MediaError, read_data_url
from broker.dialects.normalize import Image
from broker.dialects.parameters import Parameters, copies
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Vacancy, Worker
from broker.dispatch.flights import Flight
from broker.http import cache_header as reuse
from broker.http.auth import Guard, Key, Keyring
from broker.http.boarding import Boarding, check_room
from broker.http.ids import RequestIds
from broker.http.intake import Intake
from broker.http.limits import BodyBudget, Shares
from broker.http.respond import FlightResponse, Renderer, error_response, read_body
from broker.line.foreman import Foreman
from broker.line.link import Link
from protocol.errors import Code, RequestError
from protocol.messages import Finished, Generate, Media

log = logging.getLogger(__name__)

SWEEP_S = 0.25
EXPOSED_HEADERS = ("retry-after", "x-request-id", "x-should-retry", reuse.HEADER.decode())
"""What scripts from another origin may read of an answer."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes work with; put together in `__main__`."""

    settings: GatewaySettings
    dispatcher: Dispatcher
    link: Link
    keyring: Keyring = field(default_factory=Keyring)
    shares: Shares = field(default_factory=Shares)
    foreman: Foreman | None = None
    started_at: float = field(default_factory=time.monotonic)


def create_app(gateway: Gateway) -> ASGIApp:
    """The gateway's ASGI application: the routes, inside of what every request passes through."""

    def no_room() -> RequestError:
        dispatcher = gateway.dispatcher
        aboard = [flight for flight in dispatcher.flights if flight.terminal is None]
        return dispatcher.admission.busy(aboard, "The server holds as many bytes of requests as it may")

    # Not as Starlette's middlewares: the answer to an unhandled exception is made outside of those.
    app: ASGIApp = Intake(_routes(gateway), BodyBudget(gateway.settings.body_budget_bytes), no_room)
    app = Guard(app, gateway.keyring)
    if gateway.settings.cors_origins:
        # Outside of the guard: a browser asks whether it may ask, and that without a key.
        app = CORSMiddleware(
            app,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestIds(app)


def _routes(gateway: Gateway) -> Starlette:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", complete_chat, methods=["POST"]),
            Route("/v1/completions", complete_text, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", get_model),
            Route("/v1/status", show_status),
            Route("/v1/cache", cache, methods=["GET", "DELETE"]),
            Route("/health", health),
            Route("/ready", ready),
        ],
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_client_disconnect,
            Exception: _on_exception,
        },
        lifespan=_lifespan,
    )
    # Where a path with a slash too many leads is not said with a redirect to whatever host the client named.
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    if gateway.foreman is not None:
        gateway.foreman.start(gateway.dispatcher.catalogue.told)
    gateway.link.start(gateway.dispatcher.hear, gateway.dispatcher.lost)
    sweeper = asyncio.create_task(_sweep(gateway.dispatcher))
    try:
        yield
    finally:
        sweeper.cancel()
        if gateway.foreman is not None:
            gateway.foreman.close()
        gateway.link.close()


async def _sweep(dispatcher: Dispatcher) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        dispatcher.sweep()


# --- routes ------------------------------------------------------------------------------------------


async def complete_chat(request: Request) -> ASGIApp:
    """POST /v1/chat/completions, streamed or whole."""
    gateway: Gateway = request.app.state.gateway
    check_room(gateway.dispatcher)
    body = chat_body.read(await read_body(request, gateway.settings.body_bytes_max))
    found = gateway.dispatcher.find(body.model)
    conversation = chat.conversation(body, system_in_place=found.capabilities.system_in_place)
    media, frames = _read_images(conversation.images, found, gateway.settings.media_bytes_max)
    id = "chatcmpl-" + secrets.token_hex(12)
    incarnation = gateway.dispatcher.incarnation
    first = chat.generate(body, conversation.messages, media, id=id, incarnation=incarnation)
    requests = copies(first, body.n or 1)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    renderer = _renderer(
        {"id": id, "object": kind, "created": int(time.time()), "model": found.model},
        chat.Form(logprobs=bool(body.logprobs)),
        body,
        choices=len(requests),
    )
    return _respond(request, found, requests, frames, renderer, prompts=1)


async def complete_text(request: Request) -> ASGIApp:
    """POST /v1/completions, streamed or whole: the older API, text that goes on."""
    gateway: Gateway = request.app.state.gateway
    check_room(gateway.dispatcher)
    body = completions.read(await read_body(request, gateway.settings.body_bytes_max))
    found = gateway.dispatcher.find(body.model)
    id = "cmpl-" + secrets.token_hex(12)
    requests = completions.generate(body, id=id, incarnation=gateway.dispatcher.incarnation)
    renderer = _renderer(
        {"id": id, "object": "text_completion", "created": int(time.time()), "model": found.model},
        completions.Form(logprobs=body.logprobs is not None, choices=len(requests)),
        body,
        choices=len(requests),
        prompts=len(body.prompts),
    )
    return _respond(request, found, requests, [], renderer, prompts=len(body.prompts))


def _renderer(
    envelope: dict[str, object], form: answer.Form, body: Parameters, *, choices: int, prompts: int = 1
) -> Renderer:
    if not body.stream:
        return answer.Whole(envelope, form, choices=choices, prompts=prompts)
    return answer.Stream(envelope, form, choices=choices, prompts=prompts, include_usage=body.include_usage)


def _respond(
    request: Request,
    found: Worker | Vacancy,
    requests: list[Generate],
    frames: list[bytes],
    renderer: Renderer,
    *,
    prompts: int,
) -> ASGIApp:
    gateway: Gateway = request.app.state.gateway
    key: Key | None = getattr(request.state, "key", None)
    boarding = Boarding(gateway.dispatcher, gateway.shares, gateway.settings.queue_timeout_s)
    return FlightResponse(
        boarding.board(key, found, requests, frames),
        renderer,
        prompts=prompts,
        keepalive_s=gateway.settings.keepalive_s,
        on_end=partial(_log_flight, f"{key.name}: " if key else ""),
    )


def _read_images(
    images: tuple[Image, ...], found: Worker | Vacancy, bytes_max: int
) -> tuple[list[Media], list[bytes]]:
    media, frames = [], []
    for index, image in enumerate(images):
        if not found.capabilities.images:
            message = f"{found.model} does not take images."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=image.param)
        try:
            read = read_data_url(image.url, bytes_max=bytes_max)
        except MediaError as error:
            raise RequestError(Code.INVALID_MEDIA, str(error), param=image.param) from None
        media.append(Media(frame=index, mime=read.mime, sha256=read.sha256))
        frames.append(read.data)
    return media, frames


def _log_flight(who: str, flight: Flight, status: int) -> None:
    end = flight.terminal
    if isinstance(end, Finished):
        how = f"{end.reason}, {end.usage.prompt_tokens} + {end.usage.completion_tokens} tokens"
    elif end is not None:
        how = f"failed: {end.code}"
    else:
        how = f"client left after {len(flight.tokens)} tokens"
    log.info("%s%s %d %s in %.2f s", who, flight.id, status, how, time.monotonic() - flight.opened_at)


async def list_models(request: Request) -> Response:
    """GET /v1/models: every model that is configured or that a worker has named, loaded or not."""
    gateway: Gateway = request.app.state.gateway
    names = sorted(gateway.dispatcher.fleet.models)
    return JSONResponse({"object": "list", "data": [_model_object(gateway, name) for name in names]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/{id}; ids may contain slashes, and aliases are answered too."""
    gateway: Gateway = request.app.state.gateway
    name = gateway.dispatcher.catalogue.resolve(request.path_params["model"]) or ""
    if name not in gateway.dispatcher.fleet.models:
        raise RequestError(Code.MODEL_NOT_FOUND, f"The model `{name}` does not exist here.", param="model")
    return JSONResponse(_model_object(gateway, name))


def _model_object(gateway: Gateway, name: str) -> dict[str, object]:
    known = gateway.dispatcher.fleet.models[name]
    catalogue = gateway.dispatcher.catalogue
    created = int(time.time() - (time.monotonic() - known.first_seen_at))
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "roundhouse"}
    if known.context_length:
        model["context_length"] = known.context_length
    model["state"] = catalogue.state(name)
    if name in catalogue.states:
        model["aliases"] = catalogue.states[name].aliases
    return model


async def show_status(request: Request) -> Response:
    """GET /v1/status: the gateway, its workers, and where each of their requests stands."""
    gateway: Gateway = request.app.state.gateway
    uptime_s = time.monotonic() - gateway.started_at
    return JSONResponse(status.status(gateway.dispatcher, uptime_s, gateway.link.errors))


async def cache(request: Request) -> Response:
    """GET /v1/cache: the prefix caches, by model. DELETE /v1/cache[?model=…]: empty them."""
    dispatcher: Dispatcher = request.app.state.gateway.dispatcher
    if request.method == "DELETE":
        return JSONResponse(await status.clear(dispatcher, request.query_params.get("model")))
    return JSONResponse(status.caches(dispatcher.fleet))


async def health(request: Request) -> Response:
    """GET /health: the gateway lives."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /ready: some model serves, or is started when asked for; otherwise 503 with the reason and a
    Retry-After."""
    gateway: Gateway = request.app.state.gateway
    gateway.dispatcher.check_ready()
    return JSONResponse({"status": "ready"})


# --- errors ----------------------------------------------------------------------------------


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.kind.status >= 500 and request.method == "POST":
        log.warning("%s %s refused: %s", request.method, request.url.path, error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        refusal = RequestError(Code.METHOD_NOT_ALLOWED, f"{path} does not take {request.method}.")
    elif error.status_code == 404:
        refusal = RequestError(Code.ROUTE_NOT_FOUND, f"There is nothing at {path}.")
    else:
        refusal = RequestError(Code.INVALID_REQUEST, error.detail)
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent its body; nobody reads this."""
    return Response(status_code=499)


async def _on_exception(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(RequestError(Code.INTERNAL_ERROR))
