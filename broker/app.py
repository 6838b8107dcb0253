"""The gateway's ASGI application: routes, middlewares and lifespan."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.types import ASGIApp

from broker.api.admin import adapter_routes as adapters
from broker.api.admin import cache_routes as cache
from broker.api.admin import model_routes as models
from broker.api.admin import request_routes as requests
from broker.api.admin import status_routes as status
from broker.api.batches import routes as batches
from broker.api.chat import routes as chat
from broker.api.chat import stream_routes as streams
from broker.api.completions import routes as completions
from broker.api.embeddings import routes as embeddings
from broker.api.files import routes as files
from broker.api.messages import routes as messages
from broker.api.openapi import routes as openapi
from broker.api.responses import conversation_routes as conversations
from broker.api.responses import routes as responses
from broker.api.tokens import routes as tokens
from broker.dialects.host_patterns import HostPatterns
from broker.middleware import errors
from broker.middleware.auth import AuthMiddleware
from broker.middleware.content_encoding import ContentEncodingMiddleware
from broker.middleware.context import RequestContextMiddleware
from broker.middleware.limits import LIMITS, REMAINING, BodyBudget, BodyBudgetMiddleware, RateLimitMiddleware
from broker.middleware.origins import LocalCORSMiddleware, OriginMiddleware, OriginPolicy, names_of
from broker.middleware.timing import TimingMiddleware
from broker.page import page
from broker.requests import batch_lines, opening_headers
from broker.requests.recovery import recover
from broker.server.server import LoopWatchdog
from broker.state import GatewayState
from broker.transport.keep_awake import KeepAwake, SleepInhibitor
from broker.transport.router import RouterLink
from broker.transport.supervisor_client import SupervisorClient
from protocol import sockets
from protocol.errors import RequestError
from protocol.server_lock import OwnedError, ServerLock
from protocol.settings.gateway import GatewaySettings

log = logging.getLogger(__name__)

SWEEP_S = 0.25
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "request-id",
    "x-should-retry",
    "openai-processing-ms",
    opening_headers.CACHE_HEADER.decode(),
    opening_headers.RELAXED_HEADER.decode(),
    *(name.decode() for name in (*LIMITS, *REMAINING)),
)
"""Response headers that scripts from other origins may read."""

KEYLESS = frozenset({status.METRICS_PATH})
"""Paths that need no key with `keyless_metrics`."""

ROUTES = (
    *chat.ROUTES,
    *streams.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *messages.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *tokens.ROUTES,
    *embeddings.ROUTES,
    *models.ROUTES,
    *adapters.ROUTES,
    *status.ROUTES,
    *cache.ROUTES,
    *requests.ROUTES,
    *openapi.ROUTES,
    *page.ROUTES,
)


def create_app(
    gateway: GatewayState,
    link: RouterLink,
    supervisor: SupervisorClient | None = None,
    inhibitor: SleepInhibitor | None = None,
) -> ASGIApp:
    """Return the application; its lifespan starts `link` and `supervisor`.

    `inhibitor`: keeps the machine awake while requests are in flight.
    """

    def no_room() -> RequestError:
        dispatcher = gateway.dispatcher
        assigned = [flight for flight in dispatcher.flights if flight.terminal is None]
        return dispatcher.admission.busy(assigned, "The server's memory for request bodies is full")

    # Not added as Starlette middlewares: the response to an unhandled exception bypasses those.
    routes = _routes(gateway, link, supervisor, inhibitor)
    budget = BodyBudget(gateway.settings.body_budget_bytes)
    app: ASGIApp = BodyBudgetMiddleware(routes, budget, no_room, frozenset((files.PATH,)))
    routes.state.lines_app = app
    body_bytes_max = max(gateway.settings.body_bytes_max, files.FILE_BYTES_MAX)
    app = ContentEncodingMiddleware(app, budget, no_room, body_bytes_max)
    keyless = page.PATHS | (KEYLESS if gateway.settings.keyless_metrics else frozenset())
    app = AuthMiddleware(RateLimitMiddleware(app, gateway.key_concurrency), gateway.api_keys_store, keyless)
    if gateway.settings.cors_origins:
        # Outside of `AuthMiddleware`: a browser's preflight request has no key.
        app = LocalCORSMiddleware(
            app,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            allow_private_network=True,
        )
    app = OriginMiddleware(app, _origin_policy(gateway))
    return RequestContextMiddleware(TimingMiddleware(app, gateway.http_counters), gateway.media)


def _origin_policy(gateway: GatewayState) -> OriginPolicy:
    settings = gateway.settings
    return OriginPolicy(
        names=names_of(settings.host, os.uname().nodename),
        allowed_hosts=HostPatterns(settings.allowed_hosts) if settings.allowed_hosts else None,
        cors_origins=frozenset(settings.cors_origins),
        needs_key=gateway.api_keys_store.required,
    )


def _routes(
    gateway: GatewayState,
    link: RouterLink,
    supervisor: SupervisorClient | None,
    inhibitor: SleepInhibitor | None,
) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if supervisor is not None:
            supervisor.start(gateway.dispatcher.catalogue.on_model_states)
        link.start(gateway.dispatcher.on_message, gateway.dispatcher.lost)
        watchdog = LoopWatchdog()
        watchdog.start()
        recover(gateway)
        gateway.journal.start(partial(_wake_readers, asyncio.get_running_loop(), gateway))
        sweeper = asyncio.create_task(_sweep(gateway, inhibitor, watchdog))
        if gateway.batches is not None:
            gateway.batches.start(batch_lines.sender(gateway, app.state.lines_app), gateway.deferred)
        try:
            yield
        finally:
            gateway.dispatcher.stop()
            if gateway.batches is not None:
                await gateway.batches.close()
            watchdog.close()
            sweeper.cancel()
            if inhibitor is not None:
                inhibitor.close()
            if supervisor is not None:
                supervisor.close()
                _remove_leftovers(gateway.settings)
            link.close()
            gateway.offload.close()
            gateway.answers.flush()
            gateway.journal.close()

    app = Starlette(routes=ROUTES, exception_handlers=errors.HANDLERS, lifespan=lifespan)
    # No redirect for a trailing slash: it would go to whatever host the client named.
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def _wake_readers(loop: asyncio.AbstractEventLoop, gateway: GatewayState) -> None:
    """Let readers have what is on the disk now. Called by the journal's thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(gateway.answers.on_committed)


def _remove_leftovers(settings: GatewaySettings) -> None:
    """Remove control socket and lock of a supervisor that was killed, so that nothing is left behind."""
    with suppress(sockets.EndpointError, OwnedError, OSError):
        sockets.remove_stale(sockets.control_path(settings.server))
        ServerLock("roundhouse gateway", settings.host, settings.port).release()


async def _sweep(gateway: GatewayState, inhibitor: SleepInhibitor | None, watchdog: LoopWatchdog) -> None:
    wakefulness, dispatcher = KeepAwake(), gateway.dispatcher
    while True:
        await asyncio.sleep(SWEEP_S)
        watchdog.beat()
        try:
            dispatcher.sweep()
            gateway.answers.sweep()
            gateway.deferred.sweep()
            if inhibitor is not None:
                inhibitor.keep(wakefulness.is_wanted(len(dispatcher.flights) > 0, time.monotonic()))
        except Exception:  # every timeout of the gateway depends on the next sweep
            log.exception("periodic sweep failed; the next one runs in %g s", SWEEP_S)
