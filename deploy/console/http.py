"""HTTP client of an endpoint: JSON documents and streamed answers, with errors that say what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from deploy.agents.models import LaunchError, is_address, is_near, read
from deploy.agents.profiles import NO_KEY, Endpoint, Model
from protocol.common.environment import EnvironmentFault, network_variables
from protocol.event_stream import events
from protocol.server_lock import running_servers

CONNECT_S_MAX = 5.0
DOCUMENT_S_MAX = 10.0
SILENCE_S_MAX = 300.0
"""Longer than the silence of any server that sends comments while it computes."""


class ConsoleError(LaunchError):
    """The request failed or was refused; the message is for the user."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of a streamed answer: of its text or its reasoning, its finish reason, or its token count."""

    kind: Literal["text", "thought", "end", "usage"]
    text: str = ""
    tokens: int = 0


def open_client(endpoint: Endpoint) -> httpx.Client:
    """Open a client; for a server on this machine it ignores proxies. Raises `ConsoleError`."""
    headers = {} if endpoint.key == NO_KEY else {"authorization": f"Bearer {endpoint.key}"}
    timeout = httpx.Timeout(DOCUMENT_S_MAX, connect=CONNECT_S_MAX)
    if not is_address(endpoint.url):
        raise ConsoleError(f"{endpoint.url!r} is not a valid URL: write it as http://host:port")
    near = is_near(endpoint.url)
    try:
        with network_variables(os.environ, httpx.InvalidURL):
            return httpx.Client(
                base_url=endpoint.url, headers=headers, timeout=timeout, trust_env=not near, verify=not near
            )
    except (EnvironmentFault, httpx.InvalidURL) as error:
        raise ConsoleError(f"cannot connect to {endpoint.url}: {error}") from None


def models_of(endpoint: Endpoint) -> list[Model]:
    """Return the models of a running endpoint. Raises `LaunchError`."""
    with open_client(endpoint) as http:
        get(http, "/health")
        return read(get(http, "/v1/models"))


def get(http: httpx.Client, path: str) -> dict[str, Any]:
    """Fetch a JSON document. Raises `ConsoleError`."""
    return ask(http, "GET", path)


def ask(http: httpx.Client, method: str, path: str, **fields: Any) -> dict[str, Any]:
    """Send a request; return the JSON document of its response. Raises `ConsoleError`.

    `fields`: of httpx's `request`.
    """
    with _readable_errors(http):
        answer = http.request(method, path, **fields)
        if answer.status_code != 200:
            raise ConsoleError(refusal(http, answer.status_code, answer.content))
        return _object(answer.content)


def clear_cache(http: httpx.Client) -> str:
    """Clear the prefix caches of a server, if one runs; return why it refused, or ""."""
    try:
        answer = http.delete("/v1/cache")
    except httpx.TimeoutException:
        return f"{http.base_url} timed out"
    except httpx.TransportError:  # no server runs
        return ""
    # 503: no model is loaded, so nothing is in memory.
    return "" if answer.status_code in (200, 503) else refusal(http, answer.status_code, answer.content)


def stream(http: httpx.Client, body: Mapping[str, Any]) -> Generator[AnswerDelta, None, None]:
    """Stream the answer of a chat completion. Raises `ConsoleError`, also in mid-stream."""
    timeout = httpx.Timeout(SILENCE_S_MAX, connect=CONNECT_S_MAX)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with (
        _readable_errors(http),
        http.stream("POST", "/v1/chat/completions", json=asked, timeout=timeout) as answer,
    ):
        if answer.status_code != 200:
            raise ConsoleError(refusal(http, answer.status_code, answer.read()))
        for data in events(answer.iter_bytes()):
            if data.strip() != b"[DONE]":
                yield from _pieces(_object(data))


def _pieces(event: dict[str, Any]) -> Iterator[AnswerDelta]:
    if (error := event.get("error")) is not None:
        raise ConsoleError(f"the answer failed: {error.get('message', error)}")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield AnswerDelta("thought", thought)
        if text := delta.get("content"):
            yield AnswerDelta("text", text)
        if reason := choice.get("finish_reason"):
            yield AnswerDelta("end", reason)
    if isinstance(tokens := (event.get("usage") or {}).get("completion_tokens"), int):
        yield AnswerDelta("usage", tokens=tokens)


def refusal(http: httpx.Client, status: int, body: bytes) -> str:
    """Return the error message of a refused request."""
    if status == 401:
        return f"{http.base_url} requires an API key: set ROUNDHOUSE_API_KEYS, or pass serve's --config"
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return f"{http.base_url} returned {status}: this is not an OpenAI-compatible endpoint"


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConsoleError("the response is not a JSON object: this is not an OpenAI-compatible endpoint")
    return found


@contextmanager
def _readable_errors(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException:
        raise ConsoleError(f"{http.base_url} timed out: is its gateway busy or stopped?") from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConsoleError(
            f"cannot connect to {http.base_url} ({error}): start a server with `roundhouse serve`, or select"
            f" one with --host and --port, or --url{running_servers()}"
        ) from None
