"""GET /v1/status: the gateway, its workers and their requests; /v1/status/stream repeats it every second.

GET /health and /ready need no key (`PROBES`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from broker.api.admin import report
from broker.api.admin.report import StatusSnapshot
from broker.dialects.body import encode
from broker.dispatch.history import SAMPLE_S
from broker.middleware.auth import STATUS_STREAM
from broker.middleware.json_response import JsonResponse
from broker.requests.status_streams import check_watchers, watching
from broker.state import GatewayState, gateway_of


async def show_status(request: Request) -> Response:
    """Return the status as of the last heartbeats; without the samples if `history` is `false`."""
    wants_history = request.query_params.get("history") != "false"
    return JsonResponse(_document(gateway_of(request), since=0 if wants_history else None))


async def stream_status(request: Request) -> Response:
    """Stream the status as server-sent events: the first has all samples, the others only the new ones."""
    gateway = gateway_of(request)
    check_watchers(gateway)
    headers = {"cache-control": "no-cache"}
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=headers)
    return StreamingResponse(_events(gateway), media_type="text/event-stream", headers=headers)


async def _events(gateway: GatewayState) -> AsyncIterator[bytes]:
    taken = 0
    with watching(gateway):
        while not gateway.dispatcher.stopping:
            document = _document(gateway, since=taken)
            taken = gateway.dispatcher.history.taken
            yield b"event: status\ndata: " + encode(document) + b"\n\n"
            await asyncio.sleep(SAMPLE_S)


def _document(gateway: GatewayState, *, since: int | None) -> dict[str, Any]:
    """`since`: number of samples that the client has already; None for no samples."""
    dispatcher, moment = gateway.dispatcher, StatusSnapshot(time.monotonic(), time.time())
    document = report.status(
        dispatcher,
        gateway.http_counters,
        gateway.line_errors,
        moment,
        gateway.started_at,
        gateway.media.held,
        [kept.flight.id for kept in gateway.inspection.kept] if gateway.inspection else None,
    )
    document["durable"] = durable_status(gateway)
    document["batches"] = gateway.batches.overview() if gateway.batches is not None else None
    if since is not None:
        document["history"] = report.history(dispatcher.history.since(since), moment)
    return document


def durable_status(gateway: GatewayState) -> dict[str, Any]:
    """Return what outlives its client, and the journal; None: there is none."""
    answers, journal = gateway.answers, gateway.journal
    return {
        "answers": len(answers),
        "running": answers.running,
        "queued": gateway.deferred.responses,
        "bytes": answers.nbytes,
        "counts": dict(answers.counts),
        "journal": asdict(journal.status()) if journal.is_durable else None,
    }


async def health(request: Request) -> Response:
    """Report that the gateway is alive."""
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Report whether any model serves or can be loaded on demand; otherwise 503 with the reason and
    Retry-After."""
    gateway_of(request).dispatcher.check_ready()
    return JsonResponse({"status": "ready"})


ROUTES = [
    Route("/v1/status", show_status),
    Route(STATUS_STREAM, stream_status),
    Route("/health", health),
    Route("/ready", ready),
]
