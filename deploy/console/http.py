"""Asking an endpoint: documents, and answers piece by piece. What goes wrong is a sentence that says what to
do."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from deploy.agents.models import is_near
from deploy.agents.setups import NO_KEY, Endpoint

CONNECT_S_MAX = 5.0
DOCUMENT_S_MAX = 10.0
SILENCE_S_MAX = 300.0
"""Servers that send comments while they compute are never silent for so long."""


class ConsoleError(Exception):
    """There is no answer, or a refusal; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a streamed answer: of its text or of what it thinks before; or, at its end, why it ends."""

    kind: Literal["text", "thought", "end"]
    text: str


def open_client(endpoint: Endpoint) -> httpx.Client:
    """A connection of its own machine's server passes by all proxies."""
    headers = {} if endpoint.key == NO_KEY else {"authorization": f"Bearer {endpoint.key}"}
    timeout = httpx.Timeout(DOCUMENT_S_MAX, connect=CONNECT_S_MAX)
    near = is_near(endpoint.url)
    return httpx.Client(
        base_url=endpoint.url, headers=headers, timeout=timeout, trust_env=not near, verify=not near
    )


def get(http: httpx.Client, path: str) -> dict[str, Any]:
    """A document. Raises `ConsoleError`."""
    with _told(http):
        answer = http.get(path)
        if answer.status_code != 200:
            raise ConsoleError(refusal(http, answer.status_code, answer.content))
        return _object(answer.content)


def stream(http: httpx.Client, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
    """A chat's answer as it comes. Raises `ConsoleError`, also in its middle."""
    timeout = httpx.Timeout(SILENCE_S_MAX, connect=CONNECT_S_MAX)
    asked = {**body, "stream": True}
    with (
        _told(http),
        http.stream("POST", "/v1/chat/completions", json=asked, timeout=timeout) as answer,
    ):
        if answer.status_code != 200:
            raise ConsoleError(refusal(http, answer.status_code, answer.read()))
        for line in answer.iter_lines():
            if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                yield from _pieces(_object(data.encode()))


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    if (error := event.get("error")) is not None:
        raise ConsoleError(f"the answer broke off: {error.get('message', error)}")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece("thought", thought)
        if text := delta.get("content"):
            yield Piece("text", text)
        if reason := choice.get("finish_reason"):
            yield Piece("end", reason)


def refusal(http: httpx.Client, status: int, body: bytes) -> str:
    """What a refused request is told, in a sentence."""
    if status == 401:
        return f"{http.base_url} wants an API key: put one into ROUNDHOUSE_API_KEYS, or name serve's --config"
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return f"{http.base_url} answers {status}: that is no endpoint of OpenAI's APIs"


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConsoleError("what comes back is no document of OpenAI's APIs")
    return found


@contextmanager
def _told(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException:
        raise ConsoleError(f"{http.base_url} does not answer: is its gateway busy or stopped?") from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConsoleError(
            f"nothing answers at {http.base_url} ({error}): start it with `roundhouse serve`, or say where it"
            " is with --port or --url"
        ) from None
