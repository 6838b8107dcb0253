"""POST, GET and DELETE /v1/files: files of batches, in OpenAI's API."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.batches import objects as openai
from broker.api.batches.access import (
    content_response,
    find_file,
    opened,
    runner_of,
    storage_failed,
    use_store,
)
from broker.api.batches.body import read_expiry
from broker.api.batches.records import FileRecord
from broker.api.batches.store import BatchStore, StorageError, Upload
from broker.middleware.context import context_of
from broker.middleware.json_response import JsonResponse
from broker.requests.multipart import FormReader
from broker.state import gateway_of
from protocol.errors import Code, RequestError

PATH = "/v1/files"
FILE_BYTES_MAX = 200 * 2**20
PURPOSE: Literal["batch"] = "batch"
DAY_S = 24 * 3600


async def create_file(request: Request) -> Response:
    """Store a file, piece by piece as it arrives."""
    form = FormReader(request, "file")
    id = "file-" + secrets.token_hex(12)
    upload = await use_store(request, BatchStore.begin_upload, id)
    thread = runner_of(request).thread
    try:
        async for piece in form.file():
            if upload.size + len(piece) > FILE_BYTES_MAX:
                message = f"The file is larger than {FILE_BYTES_MAX} bytes."
                raise RequestError(Code.REQUEST_TOO_LARGE, message, param="file")
            await thread.do(thread.store.write, upload, piece)
        record = await thread.do(thread.store.commit, upload, _record(request, form, id, upload))
    except (StorageError, OSError) as error:
        raise storage_failed(error) from None
    finally:
        await thread.do(thread.store.abandon, upload)
    return JsonResponse(openai.file_object(record))


def _record(request: Request, reader: FormReader, id: str, upload: Upload) -> FileRecord:
    """Return the record of a complete file. Raises `RequestError` naming an invalid field."""
    form = reader.form
    if form.filename is None:
        raise RequestError(Code.INVALID_REQUEST, "'file' is required.", param="file")
    if (purpose := form.fields.get("purpose")) != PURPOSE:
        given = f", not '{purpose[:64]}'" if purpose else ""
        raise RequestError(Code.INVALID_REQUEST, f"'purpose' must be '{PURPOSE}'{given}.", param="purpose")
    age_s = read_expiry(form.fields) or gateway_of(request).settings.batch_days * DAY_S
    now = int(time.time())
    return FileRecord(
        id=id,
        owner=context_of(request).owner,
        filename=form.filename,
        purpose=PURPOSE,
        bytes=upload.size,
        created_at=now,
        expires_at=now + age_s,
    )


async def list_files(request: Request) -> Response:
    """Return one page of the files."""
    files, owner = (await opened(request)).files, context_of(request).owner
    own = [file for file in list(files.values()) if file.is_listed and file.owner == owner]
    return JsonResponse(openai.list_files(own, request.query_params))


async def one_file(request: Request) -> Response:
    """Return a file's object, or delete the file."""
    file = await find_file(request)
    if request.method == "DELETE":
        await use_store(request, _delete, file.id)
        return JsonResponse({"id": file.id, "object": "file", "deleted": True})
    return JsonResponse(openai.file_object(file))


def _delete(store: BatchStore, id: str) -> None:
    if store.is_in_use(id):
        message = "A batch that has not ended reads this file; cancel the batch first."
        raise RequestError(Code.INVALID_REQUEST, message)
    store.delete_file(id)


async def file_content(request: Request) -> Response:
    """Return the content of a file."""
    return await content_response(request, await find_file(request), "application/octet-stream")


ROUTES = [
    Route(PATH, create_file, methods=["POST"]),
    Route(PATH, list_files, methods=["GET"]),
    Route(f"{PATH}/{{id}}", one_file, methods=["GET", "DELETE"]),
    Route(f"{PATH}/{{id}}/content", file_content, methods=["GET"]),
]
