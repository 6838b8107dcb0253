"""Access log: one line for the end of each request and, with `--log-prompts`, one for its prompt."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from broker.dispatch.flight import Flight
from broker.dispatch.traffic import CLIENT_LEFT
from protocol import conversation, packed_texts
from protocol.common.log_context import about
from protocol.messages import Embed, Finished, Generate, Rank, Request

log = logging.getLogger(__name__)

PROMPT_CHARS_MAX = 65_536
"""Maximum length of a logged prompt in characters; the rest is left out."""


def log_end(request_id: str, who: str, flight: Flight, status: int) -> None:
    """Log one line for each flight. `who`: the name of the API key."""
    code, how, counts = _end_of(flight)
    seconds = time.monotonic() - flight.opened_at
    first_s = None if flight.started_at is None else round(flight.started_at - flight.opened_at, 4)
    fields = about(
        flight.id,
        request_id=request_id,
        key=who or None,
        model=flight.model,
        status=status,
        code=code,
        **counts,
        seconds=round(seconds, 3),
        time_to_first_token_s=first_s,
        resumes=max(0, flight.attempts - 1),
    )
    owner = f"{who}: " if who else ""
    log.info("%s%s %d %s in %.2f s%s", owner, flight.id, status, how, seconds, _missed(flight), extra=fields)


def _missed(flight: Flight) -> str:
    """Return which message of a conversation that goes on was not found in the prefix cache."""
    reuse = flight.reuse
    if reuse is None or reuse.message is None:
        return ""
    what = f"no cached prompt continues with message {reuse.message} ({reuse.role})"
    return f"; {reuse.tokens} prompt tokens cached: {what}"


def _end_of(flight: Flight) -> tuple[str, str, dict[str, int]]:
    """Return the flight's end code, a description of it and its token counts."""
    end = flight.terminal
    if isinstance(end, Finished):
        usage = end.usage
        how = f"{end.reason}, {usage.prompt_tokens} + {usage.completion_tokens} tokens"
        counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return end.reason, how, counts | {"cached_tokens": usage.cached_tokens}
    counts = {"prompt_tokens": flight.prompt_tokens, "completion_tokens": flight.progress}
    if end is not None:
        return end.code, f"failed: {end.code}", counts
    return CLIENT_LEFT, f"client left after {flight.progress} tokens", counts


def log_prompts(requests: Sequence[Request]) -> None:
    """Log the prompt of each request, one line each (`--log-prompts`)."""
    for request in requests:
        text = json.dumps(_asked(request), ensure_ascii=False)[:PROMPT_CHARS_MAX]
        log.info("%s asks: %s", request.id, text, extra=about(request.id))


def _asked(request: Request) -> dict[str, Any]:
    match request:
        case Generate():
            read = conversation.unpack(request)
            asked: dict[str, Any] = {
                "messages": read.messages,
                "tools": read.tools,
                "prompt": request.prompt,
                "tokens": request.tokens,
                "suffix": request.suffix,
            }
        case Embed():
            asked = {"texts": packed_texts.unpack(request)}
        case Rank():
            asked = {"query": request.query, "texts": packed_texts.unpack(request)}
    return {name: value for name, value in asked.items() if value}
