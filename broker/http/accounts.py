"""What the log says of requests: how each ended and, only where that is asked for, what it asked."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from broker.dispatch.flight import Flight
from protocol import conversation, texts
from protocol.about import about
from protocol.messages import Embed, Finished, Generate, Rank, Request

log = logging.getLogger(__name__)

PROMPT_CHARS_MAX = 65_536
"""Of one request; what is beyond is left out."""


def tell_end(request_id: str, who: str, flight: Flight, status: int) -> None:
    """One line for each flight. `who`: whose key it was."""
    code, how, counts = _end_of(flight)
    seconds = time.monotonic() - flight.opened_at
    first_s = None if flight.started_at is None else round(flight.started_at - flight.opened_at, 4)
    told = about(
        flight.id,
        request_id=request_id,
        key=who or None,
        model=flight.model,
        status=status,
        code=code,
        **counts,
        seconds=round(seconds, 3),
        time_to_first_token_s=first_s,
        resumes=max(0, flight.legs - 1),
    )
    owner = f"{who}: " if who else ""
    log.info("%s%s %d %s in %.2f s", owner, flight.id, status, how, seconds, extra=told)


def _end_of(flight: Flight) -> tuple[str, str, dict[str, int]]:
    """Its code, the same in words, and counts of tokens."""
    end = flight.terminal
    if isinstance(end, Finished):
        usage = end.usage
        how = f"{end.reason}, {usage.prompt_tokens} + {usage.completion_tokens} tokens"
        counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return end.reason, how, counts | {"cached_tokens": usage.cached_tokens}
    counts = {"prompt_tokens": flight.prompt_tokens, "completion_tokens": flight.progress}
    if end is not None:
        return end.code, f"failed: {end.code}", counts
    return "client_left", f"client left after {flight.progress} tokens", counts


def tell_prompts(requests: Sequence[Request]) -> None:
    """One line for each: for whom `--log-prompts` is set."""
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
            asked = {"texts": texts.unpack(request)}
        case Rank():
            asked = {"query": request.query, "texts": texts.unpack(request)}
    return {name: value for name, value in asked.items() if value}
