"""Client of the servers that are compared: that of `roundhouse bench`, but a failed request is an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.rivals import Server
from bench.timing import Work
from deploy.load.client import Target, chat_body, connected, stream
from deploy.load.runner import closed_loop
from deploy.load.samples import Sample

RESETS_MAX = 20
"""`mlx_lm.server` queues five connections for accept and resets further ones."""


@dataclass
class Answer(Sample):
    """A streamed answer whose progress can be awaited."""

    resets: int = 0
    underway_pieces: int = 1
    underway: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `underway_pieces` pieces have arrived, or the answer has ended."""

    def note(self, event: Mapping[str, Any], now: float) -> None:
        super().note(event, now)
        if len(self.pieces) >= self.underway_pieces:
            self.underway.set()


def client(server: Server) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """Open an HTTP client for `server` without a limit on connections."""
    return connected(Target(server.url, model=""))


async def ask(
    http: httpx.AsyncClient,
    server: Server,
    prompt: str | Sequence[Mapping[str, Any]],
    max_tokens: int,
    answer: Answer | None = None,
    **fields: Any,
) -> Answer:
    """Stream one greedy chat answer to its end; retry on a new connection if one is reset before any text.

    `prompt`: the user's message, or all messages. Raises `httpx.HTTPError` or `RuntimeError`.
    """
    answer = answer or Answer()
    body = {**chat_body(prompt, max_tokens), **server.fields, **fields}
    answer.sent_at = time.perf_counter()
    try:
        await _stream(http, body, answer)
    finally:
        answer.underway.set()
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


async def _stream(http: httpx.AsyncClient, body: Mapping[str, Any], answer: Answer) -> None:
    while True:
        try:
            return await stream(http, body, answer)
        except httpx.TransportError:
            if answer.pieces or answer.resets == RESETS_MAX:
                raise
            answer.resets += 1


async def burst(
    server: Server,
    texts: Sequence[str | Sequence[Mapping[str, Any]]],
    concurrency: int,
    max_tokens: int,
    **fields: Any,
) -> tuple[Work, list[Answer]]:
    """Send all `texts`, `concurrency` at once, and return the tokens of all answers over the total time."""
    async with client(server) as http:
        began = time.perf_counter()
        answers = await closed_loop(
            texts, lambda text: ask(http, server, text, max_tokens, **fields), concurrency
        )
        seconds = time.perf_counter() - began
    return Work(sum(answer.tokens for answer in answers), seconds), answers
