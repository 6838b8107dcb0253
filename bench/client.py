"""Streaming client that records when each piece of text arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from bench.rivals import Server
from bench.timing import Work
from protocol.event_stream import events_async

ANSWER_S_MAX = 600.0
RESETS_MAX = 20
"""`mlx_lm.server` queues five connections for accept and resets further ones."""


@dataclass
class Answer:
    """A streamed answer. Times are those of `time.perf_counter()`; `pieces`: the arrival time of each
    piece."""

    sent_at: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    """The complete text, reasoning included."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache, if the server reports them."""
    tokens: int = 0
    resets: int = 0
    underway_pieces: int = 1
    underway: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `underway_pieces` pieces have arrived, or the answer has ended."""

    @property
    def first_piece_s(self) -> float:
        """Seconds from the request to the first text."""
        return self.pieces[0] - self.sent_at

    def note(self, event: Mapping[str, Any]) -> None:
        """Process one server-sent event."""
        if (error := event.get("error")) is not None:
            raise RuntimeError(f"the stream ended with {error}")
        if (usage := event.get("usage")) is not None:
            self.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            self.tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            # Servers that send reasoning under both names send the same text twice.
            said = [delta[part] for part in ("content", "reasoning", "reasoning_content") if delta.get(part)]
            if said:
                self.pieces.append(time.perf_counter())
                self.text += said[0]
        if len(self.pieces) >= self.underway_pieces:
            self.underway.set()


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client for `server` without a limit on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=ANSWER_S_MAX, limits=limits, trust_env=False
    ) as http:
        yield http


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
    body = {
        "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.fields,
        **fields,
    }
    answer.sent_at = time.perf_counter()
    try:
        while True:
            try:
                return await _read(http, body, answer)
            except httpx.TransportError:
                if answer.pieces or answer.resets == RESETS_MAX:
                    raise
                answer.resets += 1
    finally:
        answer.underway.set()


async def _read(http: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> Answer:
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for data in events_async(response.aiter_bytes()):
            if data != b"[DONE]":
                answer.note(msgspec.json.decode(data))
    return answer


async def burst(
    server: Server,
    texts: Sequence[str | Sequence[Mapping[str, Any]]],
    concurrency: int,
    max_tokens: int,
    **fields: Any,
) -> tuple[Work, list[Answer]]:
    """Send all `texts`, `concurrency` at once, and return the tokens of all answers over the total time."""
    waiting = list(reversed(texts))
    answers: list[Answer] = []

    async def take(http: httpx.AsyncClient) -> None:
        while waiting:
            answers.append(await ask(http, server, waiting.pop(), max_tokens, **fields))

    async with client(server) as http:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(take(http))
        seconds = time.perf_counter() - began
    return Work(sum(answer.tokens for answer in answers), seconds), answers
