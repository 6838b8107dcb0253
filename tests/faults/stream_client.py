"""A streamed request with a progress watchdog: without a new token within a timeout it is hung."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system import NO_TLS, sse_documents

PAUSE_S_MIN = 0.1
CONNECT_S_MAX = 30.0
COMMENT_S_MAX = 30.0
"""Maximum time between keep-alive comments of a stream without tokens."""


class NoProgress(Exception):
    """No new token arrived within the timeout."""


@dataclass(slots=True)
class StreamResult:
    """The result of a request. `error`: the error code, or the type of a transport error. `pauses`: begin and
    end of each time without tokens of at least `PAUSE_S_MIN`. `id`: as in `/v1/status`. `hung`: the result of
    `on_hung`; None: the stream made progress."""

    status: int = 0
    id: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    hung: str | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that were restored from the prefix cache."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def stream(
    url: str, body: dict[str, Any], within_s: float, on_hung: Callable[[str], str] = lambda id: ""
) -> StreamResult:
    """Post `body` to `url` and read the stream; it is hung if a token takes longer than `within_s`.

    `on_hung`: called with the id of the stream, empty before the first token, while the stream is still open.
    """
    result = StreamResult()
    sent_at = time.monotonic()
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    timeout = httpx.Timeout(within_s + COMMENT_S_MAX, connect=CONNECT_S_MAX)
    try:
        with httpx.stream("POST", url, json=body, timeout=timeout, verify=NO_TLS) as answer:
            result.status = answer.status_code
            if result.status != 200:
                result.error = json.loads(answer.read())["error"]["code"]
                return result
            try:
                _read(answer, result, sent_at, within_s)
            except NoProgress:
                result.hung = on_hung(result.id)
    except httpx.ReadTimeout:
        result.hung = "not even a comment came"
    except httpx.TransportError as error:
        result.error = type(error).__name__
    return result


def _read(answer: httpx.Response, result: StreamResult, sent_at: float, within_s: float) -> None:
    for event in sse_documents(_watched(answer, result, sent_at, within_s)):
        if event == "[DONE]":
            return
        document = json.loads(event)
        result.id = document.get("id") or result.id
        if "error" in document:
            result.error = document["error"]["code"]
            return
        result.usage = document.get("usage") or result.usage
        for choice in document["choices"]:
            result.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            result.finish_reason = choice["finish_reason"] or result.finish_reason
    result.error = "cut_off"


def _watched(answer: httpx.Response, result: StreamResult, sent_at: float, within_s: float) -> Iterator[str]:
    """Yield the lines with data. Keep-alive comments do not count as progress."""
    last = sent_at
    for line in answer.iter_lines():
        now = time.monotonic()
        if line.startswith("data: "):
            if now - last > PAUSE_S_MIN:
                result.pauses.append((last, now))
            last = now
            yield line
        elif now - last > within_s:
            raise NoProgress
