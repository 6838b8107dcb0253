"""POST /v1/models/pull: download a model of the hub. GET /v1/models/pull[/ID], POST …/ID/cancel.

The supervisor downloads; the gateway only orders and reports. A client that leaves cancels nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from broker.api.admin.model_body import read_choice
from broker.dialects.body import encode
from broker.middleware.json_response import JsonResponse
from broker.requests.respond import read_body
from broker.state import GatewayState, check_watchers, gateway_of, watching
from protocol.supervisor_messages import PullState

CHOICE_BYTES_MAX = 4096
LOOK_S = 0.25
"""Interval in seconds at which a stream looks at its download."""
STREAM_S_MAX = 24 * 3600.0
"""Maximum time of a stream of progress; the download goes on after it."""


async def pull(request: Request) -> Response:
    """Order a download; return it without waiting, or stream its progress up to its end."""
    gateway = gateway_of(request)
    choice = read_choice(await read_body(request, CHOICE_BYTES_MAX))
    if choice.stream:
        check_watchers(gateway)
    state = gateway.dispatcher.catalogue.pulls.order(choice.model)
    gateway.dispatcher.catalogue.update()
    if not choice.stream:
        return JsonResponse(_object(state))
    progress = _progress(gateway, state.id)
    return StreamingResponse(progress, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def show_all(request: Request) -> Response:
    """List the downloads that run, and the last ones."""
    pulls = gateway_of(request).dispatcher.catalogue.pulls
    return JsonResponse({"object": "list", "data": [_object(state) for state in pulls.states()]})


async def show(request: Request) -> Response:
    """Return a download."""
    return JsonResponse(
        _object(gateway_of(request).dispatcher.catalogue.pulls.state(request.path_params["id"]))
    )


async def cancel(request: Request) -> Response:
    """Cancel a download. A finished one stays as it is."""
    catalogue = gateway_of(request).dispatcher.catalogue
    state = catalogue.pulls.cancel(request.path_params["id"])
    catalogue.update()
    return JsonResponse(_object(state))


async def _progress(gateway: GatewayState, id: str) -> AsyncIterator[bytes]:
    """Yield an event for each change of a download, until it has ended."""
    pulls, last, silent_since = gateway.dispatcher.catalogue.pulls, b"", time.monotonic()
    until = silent_since + STREAM_S_MAX
    with watching(gateway):
        while not gateway.dispatcher.stopping:
            now, state = time.monotonic(), pulls.state(id)
            if (said := encode({"type": "pull", "pull": _object(state)})) != last:
                last, silent_since = said, now
                yield b"event: pull\ndata: %b\n\n" % said
            elif now - silent_since >= gateway.settings.keepalive_s:
                silent_since = now
                yield b": keep-alive\n\n"
            if state.stage != "running" or now >= until:
                return
            await asyncio.sleep(LOOK_S)


def _object(state: PullState) -> dict[str, object]:
    progress = {"done_bytes": state.done_bytes, "total_bytes": state.total_bytes}
    told = {"id": state.id, "object": "model.pull", "model": state.model, "status": state.stage, **progress}
    return told | ({"failure": state.failure} if state.failure else {})


ROUTES = [
    Route("/v1/models/pull", show_all, methods=["GET"]),
    Route("/v1/models/pull", pull, methods=["POST"]),
    Route("/v1/models/pull/{id}", show, methods=["GET"]),
    Route("/v1/models/pull/{id}/cancel", cancel, methods=["POST"]),
]
