"""Client that measures one streamed chat completion."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.load.samples import Sample, reason
from protocol.common.environment import EnvironmentFault, network_variables
from protocol.event_stream import events_async

ANSWER_S_MAX = 600.0
CONNECT_S_MAX = 10.0


class TargetError(Exception):
    """An endpoint that cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint with a model. `url`: as http://host:port, without `/v1`."""

    url: str
    model: str
    key: str | None = field(default=None, repr=False)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with unlimited connections; for plain http: it ignores proxies. Raises `TargetError`."""
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(ANSWER_S_MAX, connect=CONNECT_S_MAX)
    is_plain = target.url.startswith("http:")
    try:
        with network_variables(os.environ, httpx.InvalidURL):
            client = httpx.AsyncClient(
                base_url=target.url,
                headers=headers,
                limits=limits,
                timeout=timeout,
                trust_env=not is_plain,
                verify=not is_plain,
            )
    except (EnvironmentFault, httpx.InvalidURL) as error:
        raise TargetError(f"cannot connect to {target.url}: {error}") from None
    async with client as http:
        yield http


def chat_body(messages: str | Sequence[Mapping[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy, streamed request. `messages`: all of them, or the text of the only one."""
    return {
        "messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(http: httpx.AsyncClient, body: Mapping[str, Any], sample: Sample) -> None:
    """Send a request and record its answer, or the server's error.

    Raises `httpx.HTTPError`, `TimeoutError` or `ValueError`.
    """
    response = http.stream("POST", "/v1/chat/completions", json=body)
    async with asyncio.timeout(ANSWER_S_MAX), response as answer:
        if answer.status_code != 200:
            sample.error = _refusal(answer.status_code, await answer.aread())
            return
        done = False
        async for data in events_async(answer.aiter_bytes()):
            if data.strip() == b"[DONE]":
                done = True
            else:
                sample.note(json.loads(data), time.perf_counter())
    if not done and not sample.error:
        sample.error = "cut off"


async def ask(
    http: httpx.AsyncClient, target: Target, prompt: str | Sequence[Mapping[str, Any]], max_tokens: int
) -> Sample:
    """Send a request of exactly `max_tokens` tokens, if the server supports `ignore_eos`. Errors are recorded
    in the sample."""
    body = {"model": target.model, **chat_body(prompt, max_tokens), "ignore_eos": True}
    sample = Sample(sent_at=time.perf_counter())
    try:
        await stream(http, body, sample)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        sample.error = type(error).__name__
    sample.ended_at = time.perf_counter()
    return sample


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {reason(json.loads(body)['error'])}"
    except (ValueError, TypeError, KeyError):
        return str(status)


async def first_model(url: str, key: str | None) -> str:
    """Return the first model of an endpoint. Raises `TargetError`."""
    async with connected(Target(url, "", key)) as http:
        try:
            answer = await http.get("/v1/models", timeout=CONNECT_S_MAX)
            if answer.status_code != 200:
                raise TargetError(f"{url}/v1/models returned {_refusal(answer.status_code, answer.content)}")
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TargetError(f"cannot connect to {url} ({error or type(error).__name__})") from None
        except (ValueError, LookupError, TypeError):
            raise TargetError(f"{url} lists no models: name one with --model") from None
