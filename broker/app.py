"""The gateway's ASGI application: routes, inside of what every request passes through, and its lifespan."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.wakefulness import Wakefulness
from broker.http import cache_header
from broker.http.auth import Guard
from broker.http.ids import RequestIds
from broker.http.intake import Intake
from broker.http.limits import BodyBudget
from broker.http.quota import LIMITS, REMAINING, Quota
from broker.http.timing import Timing
from broker.line.caffeine import Caffeine
from broker.line.foreman import Foreman
from broker.line.link import Link
from broker.page import page
from broker.routes import (
    cache,
    chat,
    completions,
    embeddings,
    errors,
    health,
    inspect,
    messages,
    metrics,
    models,
    openapi,
    rerank,
    responses,
    status,
    tokens,
)
from broker.routes.gateway import Gateway
from protocol.errors import RequestError

SWEEP_S = 0.25
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "request-id",
    "x-should-retry",
    "openai-processing-ms",
    cache_header.HEADER.decode(),
    *(name.decode() for name in (*LIMITS, *REMAINING)),
)
"""What scripts from another origin may read of an answer."""

KEYLESS = frozenset({metrics.PATH})
"""What needs no key where the settings say so."""

ROUTES = (
    *chat.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *tokens.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    *models.ROUTES,
    *status.ROUTES,
    *metrics.ROUTES,
    *cache.ROUTES,
    *inspect.ROUTES,
    *health.ROUTES,
    *openapi.ROUTES,
    *page.ROUTES,
)


def create_app(
    gateway: Gateway, link: Link, foreman: Foreman | None = None, caffeine: Caffeine | None = None
) -> ASGIApp:
    """The application; while it runs, `link` and `foreman` are heard. `caffeine`: what keeps the machine
    awake while requests run."""

    def no_room() -> RequestError:
        dispatcher = gateway.dispatcher
        aboard = [flight for flight in dispatcher.flights if flight.terminal is None]
        return dispatcher.admission.busy(aboard, "The server holds as many bytes of requests as it may")

    # Not as Starlette's middlewares: the answer to an unhandled exception is made outside of those.
    routes = _routes(gateway, link, foreman, caffeine)
    budget = BodyBudget(gateway.settings.body_budget_bytes)
    app: ASGIApp = Intake(routes, budget, gateway.media, no_room)
    keyless = page.PATHS | (KEYLESS if gateway.settings.keyless_metrics else frozenset())
    app = Guard(Quota(app, gateway.shares), gateway.keyring, keyless)
    if gateway.settings.cors_origins:
        # Outside of the guard: a browser asks whether it may ask, and that without a key.
        app = CORSMiddleware(
            app,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestIds(Timing(app, gateway.tally))


def _routes(gateway: Gateway, link: Link, foreman: Foreman | None, caffeine: Caffeine | None) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if foreman is not None:
            foreman.start(gateway.dispatcher.catalogue.told)
        link.start(gateway.dispatcher.hear, gateway.dispatcher.lost, gateway.dispatcher.turn_away)
        sweeper = asyncio.create_task(_sweep(gateway.dispatcher, caffeine))
        try:
            yield
        finally:
            sweeper.cancel()
            if caffeine is not None:
                caffeine.close()
            if foreman is not None:
                foreman.close()
            link.close()
            gateway.aside.close()

    app = Starlette(routes=ROUTES, exception_handlers=errors.HANDLERS, lifespan=lifespan)
    # Where a path with a slash too many leads is not said with a redirect to whatever host the client named.
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


async def _sweep(dispatcher: Dispatcher, caffeine: Caffeine | None) -> None:
    wakefulness = Wakefulness()
    while True:
        await asyncio.sleep(SWEEP_S)
        dispatcher.sweep()
        if caffeine is not None:
            caffeine.keep(wakefulness.is_wanted(len(dispatcher.flights) > 0, time.monotonic()))
