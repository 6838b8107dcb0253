"""Access of the routes to files and batches: whose they are, and errors of the disk as responses."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from broker.api.batches.records import BatchRecord, Dialect, FileRecord
from broker.api.batches.runner import BatchRunner, ClosedError
from broker.api.batches.store import BatchStore, StorageError
from broker.middleware.context import context_of
from broker.state import gateway_of
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_BYTES = 2**18


def runner_of(request: Request) -> BatchRunner:
    """Return the runner of batches. Raises `RequestError` if they are disabled."""
    runner = gateway_of(request).batches
    if runner is None:
        raise RequestError(Code.ROUTE_NOT_FOUND, "Batches are disabled on this server (--batch-storage 0).")
    return runner


async def use_store(request: Request, work: Callable[..., T], *args: object) -> T:
    """Call `work(store, *args)` on the store's thread. Raises what `work` raises, and
    `RequestError(storage_failed)` if the folder or the disk cannot be used."""
    runner = runner_of(request)
    try:
        return await runner.thread.do(_opened, runner.thread.store, work, *args)
    except (StorageError, OSError) as error:
        raise storage_failed(error) from None


def _opened(store: BatchStore, work: Callable[..., T], *args: object) -> T:
    store.open()
    return work(store, *args)


def storage_failed(error: StorageError | OSError) -> RequestError:
    """Return the response to an error of the disk. Paths go to the log only."""
    if isinstance(error, ClosedError):
        return RequestError(Code.SHUTTING_DOWN, retry_after_s=1.0)
    log.warning("a batch or its file could not be stored: %s", error)
    if isinstance(error, StorageError):
        return RequestError(Code.STORAGE_FAILED, str(error))
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or "the disk failed"
    return RequestError(Code.STORAGE_FAILED, f"The server cannot store this: {reason}.")


async def opened(request: Request) -> BatchStore:
    """Return the store, open for reading its records. Raises `RequestError`."""
    store = runner_of(request).thread.store
    if not store.is_open and store.exists():
        await use_store(request, lambda store: None)
    return store


async def find_file(request: Request) -> FileRecord:
    """Return the file that the path names. Raises `RequestError(file_not_found)`."""
    id = request.path_params["id"]
    found = (await opened(request)).files.get(id)
    if found is None or not found.is_listed or found.owner != context_of(request).owner:
        raise RequestError(Code.FILE_NOT_FOUND, f"No such File object: {id[:128]}", param="id")
    return found


async def find_batch(request: Request, dialect: Dialect) -> BatchRecord:
    """Return the batch that the path names. Raises `RequestError(batch_not_found)`."""
    id = request.path_params["id"]
    found = (await opened(request)).batches.get(id)
    if found is None or found.dialect != dialect or found.owner != context_of(request).owner:
        raise RequestError(Code.BATCH_NOT_FOUND, f"No batch found with id '{id[:128]}'.", param="id")
    return found


async def own_batches(request: Request, dialect: Dialect) -> list[BatchRecord]:
    """Return the batches of the request's owner, newest first."""
    batches, owner = (await opened(request)).batches, context_of(request).owner
    found = [b for b in list(batches.values()) if b.dialect == dialect and b.owner == owner]
    return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)


async def content_response(request: Request, file: FileRecord, media_type: str) -> Response:
    """Return the content of a file. Raises `RequestError`."""
    descriptor = await use_store(request, _open_content, file.id)
    headers = {"content-length": str(file.bytes)}
    if request.method == "HEAD":
        os.close(descriptor)
        return Response(media_type=media_type, headers=headers)
    return StreamingResponse(_pieces(descriptor), media_type=media_type, headers=headers)


def _open_content(store: BatchStore, id: str) -> int:
    try:
        return os.open(store.content_path(id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RequestError(Code.FILE_NOT_FOUND) from None


async def _pieces(descriptor: int) -> AsyncIterator[bytes]:
    offset = 0
    try:
        while piece := await asyncio.to_thread(os.pread, descriptor, CHUNK_BYTES, offset):
            offset += len(piece)
            yield piece
    finally:
        os.close(descriptor)
