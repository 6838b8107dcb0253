"""A batch of a file, on a server: created or, after an interruption, found again; watched, and saved.

Beside the file, `FILE.batch` remembers the batch until its results are saved.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal

import httpx

from deploy.console.http import CONNECT_S_MAX, ConsoleError, refusal
from protocol.common.text_files import EncodingError, without_mark

POLL_S = 0.5
AWAY_S_MAX = 300.0
"""Longest time that a server may be away while its batch is watched: it may be restarted meanwhile."""
TRANSFER_S_MAX = 600.0
TIMEOUT = httpx.Timeout(TRANSFER_S_MAX, connect=CONNECT_S_MAX)
OPENAI, ANTHROPIC = "/v1/batches", "/v1/messages/batches"


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file of requests. `endpoint`: that of its first line; empty in Anthropic's format."""

    path: Path
    dialect: Literal["openai", "anthropic"]
    endpoint: str
    digest: str

    @property
    def memory(self) -> Path:
        """The file that remembers the batch."""
        return self.path.with_name(self.path.name + ".batch")

    @property
    def batches(self) -> str:
        return OPENAI if self.dialect == "openai" else ANTHROPIC


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a batch. `status`: `ended` if it is over, in either API."""

    status: str
    total: int
    done: int
    document: dict[str, Any]


def read_file(path: Path) -> BatchFile:
    """Look at a file of requests. Raises `ConsoleError` or `OSError`."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        line = json.loads(without_mark(first))
        if "params" in line:
            return BatchFile(path, "anthropic", "", digest)
        return BatchFile(path, "openai", str(line["url"]), digest)
    except EncodingError as error:
        raise ConsoleError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError):
        raise ConsoleError(
            f"{path}: the first line is no request: it needs custom_id, method, url and body, or custom_id"
            " and params"
        ) from None


def find(http: httpx.Client, file: BatchFile) -> str | None:
    """Return the batch that an interrupted command has created of this file; None if there is none."""
    try:
        known = json.loads(file.memory.read_bytes())
        if (known["url"], known["sha256"]) != (str(http.base_url), file.digest):
            return None
        id = str(known["batch"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return id if _ask(http, "GET", f"{file.batches}/{id}", gone=404) is not None else None


def create(http: httpx.Client, file: BatchFile) -> str:
    """Upload the file, create a batch of it and remember it; return its id. Raises `ConsoleError` or
    `OSError`."""
    if file.dialect == "openai":
        with file.path.open("rb") as content:
            files = {"file": (file.path.name, content)}
            uploaded = _ask(http, "POST", "/v1/files", files=files, data={"purpose": "batch"})
        asked = {"input_file_id": uploaded["id"], "endpoint": file.endpoint, "completion_window": "24h"}
        created = _ask(http, "POST", OPENAI, json=asked)
    else:
        lines = without_mark(file.path.read_bytes()).split(b"\n")
        body = b'{"requests":[' + b",".join(line for line in lines if line.strip()) + b"]}"
        headers = {"content-type": "application/json"}
        created = _ask(http, "POST", ANTHROPIC, content=body, headers=headers)
    known = {"batch": created["id"], "url": str(http.base_url), "sha256": file.digest}
    file.memory.write_text(json.dumps(known), encoding="utf-8")
    return str(created["id"])


def watch(
    http: httpx.Client,
    file: BatchFile,
    id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] | None = None,
) -> Iterator[Progress]:
    """Yield the state of a batch again and again until it is over, and then once more.

    Raises `ConsoleError`, for a server that is away only after `AWAY_S_MAX`.
    """
    seen_at, wait = clock(), wait or Event().wait
    while True:
        try:
            progress = _progress(file, _ask(http, "GET", f"{file.batches}/{id}"))
        except httpx.TransportError as error:
            if clock() - seen_at > AWAY_S_MAX:
                raise ConsoleError(f"cannot connect to {http.base_url}: {error}") from None
        else:
            seen_at = clock()
            yield progress
            if progress.status == "ended":
                return
        wait(POLL_S)


def _progress(file: BatchFile, document: dict[str, Any]) -> Progress:
    counts = document.get("request_counts") or {}
    if file.dialect == "anthropic":
        done = sum(counts[name] for name in ("succeeded", "errored", "canceled", "expired"))
        return Progress(document["processing_status"], done + counts["processing"], done, document)
    is_over = document["status"] in ("completed", "failed", "expired", "cancelled")
    status = "ended" if is_over else document["status"]
    done = counts["completed"] + counts["failed"]
    return Progress(status, counts["total"], done, document)


def save(http: httpx.Client, file: BatchFile, document: dict[str, Any], out: Path) -> None:
    """Save the results of a batch that is over, errors last. Raises `ConsoleError` or `OSError`."""
    if file.dialect == "anthropic":
        paths = [f"{ANTHROPIC}/{document['id']}/results"]
    else:
        ids = (document["output_file_id"], document["error_file_id"])
        paths = [f"/v1/files/{id}/content" for id in ids if id]
    fresh = out.with_name(out.name + ".new")
    with fresh.open("wb") as target:
        for path in paths:
            with http.stream("GET", path, timeout=TIMEOUT) as answer:
                if answer.status_code != 200:
                    raise ConsoleError(refusal(http, answer.status_code, answer.read()))
                for piece in answer.iter_bytes():
                    target.write(piece)
    fresh.replace(out)
    with suppress(FileNotFoundError):
        file.memory.unlink()


def faults(document: dict[str, Any]) -> list[str]:
    """Return why the server could not run a batch, one text for each line at fault."""
    found = (document.get("errors") or {}).get("data") or []
    return [f"line {each['line']}: {each['message']}" if each["line"] else each["message"] for each in found]


def _ask(http: httpx.Client, method: str, path: str, gone: int | None = None, **more: Any) -> Any:
    """Return the document of a response; None for the status `gone`. Raises `ConsoleError`."""
    answer = http.request(method, path, timeout=TIMEOUT, **more)
    if answer.status_code == gone:
        return None
    if answer.status_code != 200:
        raise ConsoleError(refusal(http, answer.status_code, answer.content))
    return answer.json()
