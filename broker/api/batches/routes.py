"""POST and GET /v1/batches: batches in OpenAI's API."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.batches import objects as openai
from broker.api.batches import records
from broker.api.batches.access import find_batch, own_batches, runner_of, use_store
from broker.api.batches.body import read_batch
from broker.api.batches.records import BatchRecord
from broker.api.batches.store import BatchStore
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.state import gateway_of
from protocol.errors import Code, RequestError


async def create_batch(request: Request) -> Response:
    """Create a batch of a file; it is validated at once, and runs when nothing else does."""
    body = read_batch(await read_body(request, gateway_of(request).settings.body_bytes_max))
    batch = openai.new_batch(body, context_of(request).owner, time.time())
    await use_store(request, _create, batch)
    runner_of(request).wake()
    return _shown(batch)


def _create(store: BatchStore, batch: BatchRecord) -> None:
    file = store.files.get(batch.input_file_id)
    if file is None or file.owner != batch.owner or file.purpose != "batch":
        message = f"No file of purpose 'batch' has the id '{batch.input_file_id[:128]}'."
        raise RequestError(Code.INVALID_REQUEST, message, param="input_file_id")
    store.put(batch)


async def list_batches(request: Request) -> Response:
    """Return one page of the batches, newest first."""
    shown = [openai.batch_object(batch) for batch in await own_batches(request, "openai")]
    return JsonResponse({"object": "list", **openai.BATCHES.page(shown, request.query_params)})


async def one_batch(request: Request) -> Response:
    """Return a batch."""
    return _shown(await find_batch(request, "openai"))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; what has been answered stays. A batch that is being cancelled does not change."""
    batch = await find_batch(request, "openai")
    batch = await use_store(request, cancel, batch.id)
    runner_of(request).wake()
    return _shown(batch)


def cancel(store: BatchStore, id: str) -> BatchRecord:
    """Store that a batch is being cancelled. Raises `RequestError` if it is over."""
    batch = store.batches[id]
    if batch.is_over and batch.status != "cancelled":
        message = f"A batch with status '{batch.status}' cannot be cancelled."
        raise RequestError(Code.INVALID_REQUEST, message)
    cancelled = records.cancel(batch, time.time())
    if cancelled is not batch:
        store.put(cancelled)
    return cancelled


def _shown(batch: BatchRecord) -> Response:
    return JsonResponse(openai.batch_object(batch))


ROUTES = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{id}", one_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
]
