"""/v1/batches: batches in OpenAI's API; /v1/messages/batches: in Anthropic's."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.batches import message_objects as anthropic
from broker.api.batches import objects as openai
from broker.api.batches import records
from broker.api.batches.access import content_response, find_batch, own_batches, runner_of, use_store
from broker.api.batches.body import read_batch
from broker.api.batches.lines import FileCheck
from broker.api.batches.records import BatchRecord, FileRecord
from broker.api.batches.store import BatchStore
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.state import gateway_of
from protocol.errors import Code, RequestError

MESSAGE_PATH = "/v1/messages/batches"
DAY_S = 24 * 3600


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
    """Cancel a batch of either API; what has been answered stays. A batch that is being cancelled does not
    change."""
    is_message = request.url.path.startswith(MESSAGE_PATH)
    batch = await find_batch(request, "anthropic" if is_message else "openai")
    batch = await use_store(request, _cancel, batch.id)
    runner_of(request).wake()
    return _message_shown(request, batch) if is_message else _shown(batch)


def _cancel(store: BatchStore, id: str) -> BatchRecord:
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


# --- /v1/messages/batches: batches in Anthropic's API ------------------------------------------------


async def create_message_batch(request: Request) -> Response:
    """Create a batch of requests, which are checked first."""
    gateway = gateway_of(request)
    runner = runner_of(request)
    raw = await read_body(request, gateway.settings.body_bytes_max)
    lines, check = await gateway.offload.work(len(raw), partial(anthropic.read_batch, raw))
    batch = anthropic.new_batch(check, context_of(request).owner, time.time())
    created = await use_store(
        request, _create_message_batch, batch, lines, check, gateway.settings.batch_days * DAY_S
    )
    runner.wake()
    return _message_shown(request, created)


def _create_message_batch(
    store: BatchStore, batch: BatchRecord, lines: list[bytes], check: FileCheck, age_s: int
) -> BatchRecord:
    upload = store.begin_upload(batch.input_file_id)
    file = FileRecord(
        id=batch.input_file_id,
        owner=batch.owner,
        filename=f"{batch.id}.jsonl",
        purpose="message_batch",
        bytes=0,
        created_at=batch.created_at,
        expires_at=batch.created_at + age_s,
    )
    try:
        for line in lines:
            store.write(upload, line + b"\n")
        store.commit(upload, file)
    finally:
        store.abandon(upload)
    begun = records.begin(batch, check.total, check.model, batch.created_at)
    store.put(begun)
    return begun


async def list_message_batches(request: Request) -> Response:
    """Return one page of the batches, newest first."""
    shown = [_object(request, batch) for batch in await own_batches(request, "anthropic")]
    return JsonResponse(anthropic.PAGING.page(shown, request.query_params))


async def one_message_batch(request: Request) -> Response:
    """Return a batch, or delete one that has ended."""
    batch = await find_batch(request, "anthropic")
    if request.method != "DELETE":
        return _message_shown(request, batch)
    if not batch.is_over:
        message = "The batch has not ended; cancel it first, and wait for its end."
        raise RequestError(Code.INVALID_REQUEST, message)
    await use_store(request, BatchStore.delete_batch, batch.id)
    return JsonResponse({"id": batch.id, "type": "message_batch_deleted"})


async def message_batch_results(request: Request) -> Response:
    """Return the results of a batch that has ended, one in each line."""
    batch = await find_batch(request, "anthropic")
    if not batch.is_over:
        raise RequestError(Code.INVALID_REQUEST, "The batch has not ended, so it has no results yet.")
    file = runner_of(request).thread.store.files.get(batch.output_file_id or "")
    if file is None:
        raise RequestError(Code.BATCH_NOT_FOUND, "The results of this batch are no longer stored.")
    return await content_response(request, file, "application/x-jsonl")


def _object(request: Request, batch: BatchRecord) -> dict[str, object]:
    url = request.url.replace(path=f"{MESSAGE_PATH}/{batch.id}/results", query="")
    return anthropic.batch_object(batch, str(url))


def _message_shown(request: Request, batch: BatchRecord) -> Response:
    return JsonResponse(_object(request, batch))


ROUTES = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{id}", one_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
    Route(MESSAGE_PATH, create_message_batch, methods=["POST"]),
    Route(MESSAGE_PATH, list_message_batches, methods=["GET"]),
    Route(f"{MESSAGE_PATH}/{{id}}", one_message_batch, methods=["GET", "DELETE"]),
    Route(f"{MESSAGE_PATH}/{{id}}/cancel", cancel_batch, methods=["POST"]),
    Route(f"{MESSAGE_PATH}/{{id}}/results", message_batch_results, methods=["GET"]),
]
