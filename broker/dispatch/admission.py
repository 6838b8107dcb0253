"""Admission control: accept a request, or refuse it with a reason and a Retry-After. Pure.

Two limits apply. Number: a worker's rows plus a bounded number of waiting requests. Size: waiting prompts may
have a few times the tokens that fit into the worker's memory, so that long prompts neither queue for hours
nor fill the memory of both processes. The size limit does not apply while no request waits: the worker itself
rejects a prompt that never fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from broker.dispatch.flight import Flight
from protocol.conversation import packed_bytes
from protocol.errors import Code, RequestError, too_long
from protocol.messages import Generate, Ready, Request

RETRY_AFTER_S_MAX = 120.0
WAITING_TURNS = 4
"""Default limit of waiting prompt tokens, as a multiple of the tokens that fit into the worker's memory."""
BYTES_PER_TOKEN = 4
"""Typical value, to estimate the length of a prompt that its worker has not tokenized yet."""
_NAMED_MAX = 16
_SMOOTHING = 0.2


class Admission:
    """Admission limits of a worker, and the measured service time behind Retry-After."""

    def __init__(
        self, *, clock: Callable[[], float], waiting_max: int, waiting_tokens_max: int | None = None
    ) -> None:
        """`waiting_tokens_max`: None means `WAITING_TURNS` times what fits into the worker's memory."""
        self._clock = clock
        self._waiting_max = waiting_max
        self._waiting_tokens_max = waiting_tokens_max
        self._service_s: float | None = None
        self._promised_until = -math.inf

    def check(self, assigned: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> None:
        """Check that a worker with the flights `assigned` can take all of `requests`.

        Raises `RequestError(text_generation_busy)`, or `invalid_request` if they could never be admitted.
        """
        self._check_number(assigned, ready, len(requests))
        self._check_size(assigned, ready, requests)

    def has_room(self, assigned: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> bool:
        """Return whether `check` would admit `requests`."""
        return (
            self._fits_number(assigned, ready, len(requests))
            and self._lacking(assigned, ready, requests) is None
        )

    def is_full(self, assigned: Sequence[Flight], ready: Ready) -> bool:
        """Return whether no further request can be admitted, whatever its size."""
        return len(assigned) >= ready.running_max + self._waiting_max

    def _check_number(self, assigned: Sequence[Flight], ready: Ready, asked: int) -> None:
        room = ready.running_max + self._waiting_max
        if self._fits_number(assigned, ready, asked):
            return
        if asked > max(room, 1):
            message = f'"n" asks for {asked} answers, but this server has room for {room}. Reduce "n".'
            raise RequestError(Code.INVALID_REQUEST, message, param="n")
        raise self.busy(assigned)

    def _fits_number(self, assigned: Sequence[Flight], ready: Ready, asked: int) -> bool:
        return len(assigned) + asked <= ready.running_max + self._waiting_max

    def _check_size(self, assigned: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> None:
        if (why := self._lacking(assigned, ready, requests)) is not None:
            raise self.busy(assigned, why)

    def _lacking(self, assigned: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> str | None:
        """Return why the prompts have too many tokens beside the waiting ones; None if they fit."""
        most = self._tokens_max(ready)
        waiting = [flight for flight in assigned if not has_begun(flight)]
        if most is None or not waiting:
            return None
        held = sum(_within(ready, flight.request, _prompt_tokens(flight)) for flight in waiting)
        asked = sum(_within(ready, request, guessed_tokens(request)) for request in requests)
        if held + asked <= most:
            return None
        return f"Waiting prompts have {held} tokens, and about {asked} more exceed the limit of {most}"

    def _tokens_max(self, ready: Ready) -> int | None:
        if self._waiting_tokens_max is not None:
            return self._waiting_tokens_max
        return WAITING_TURNS * ready.tokens_max or None

    def busy(self, assigned: Sequence[Flight], why: str = "The server is at capacity") -> RequestError:
        """Return the refusal: the running and waiting requests among `assigned`, and a Retry-After."""
        running: list[Flight] = []
        waiting: list[Flight] = []
        for flight in assigned:
            (running if has_begun(flight) else waiting).append(flight)
        running_ids, waiting_ids = (
            [flight.id for flight in some[:_NAMED_MAX]] for some in (running, waiting)
        )
        return RequestError(
            Code.TEXT_GENERATION_BUSY,
            f"{why}: {len(running)} requests are running and {len(waiting)} are waiting."
            f"{_listed('Running', running_ids, len(running))}{_listed('Waiting', waiting_ids, len(waiting))}",
            retry_after_s=self._promise_s(len(assigned)),
            details={
                "running": len(running),
                "waiting": len(waiting),
                "running_ids": running_ids,
                "waiting_ids": waiting_ids,
            },
        )

    # --- Retry-After ---

    def served(self, duration_s: float) -> None:
        """Add a finished request's duration to the moving average of the service time."""
        if self._service_s is None:
            self._service_s = duration_s
        else:
            self._service_s += _SMOOTHING * (duration_s - self._service_s)

    def retry_after_s(self, assigned: int) -> float:
        """Return the expected time until one of `assigned` requests finishes, in whole seconds, at least 1.

        The measured service time includes waiting, so the time between two completions is that time divided
        by the number of requests (Little's law).
        """
        return _whole((self._service_s or 0.0) / max(assigned, 1))

    def _promise_s(self, assigned: int) -> float:
        """Return a Retry-After that differs for each refused request, so that they do not all retry at once.

        Each refusal is promised the next free place, at the latest when all present requests should be done.
        """
        now, service_s = self._clock(), self._service_s or 0.0
        promised = max(now, self._promised_until) + service_s / max(assigned, 1)
        self._promised_until = min(promised, now + service_s)
        return _whole(self._promised_until - now)


def has_begun(flight: Flight) -> bool:
    """Return whether the worker has dequeued the request; it then reports the prefix hit at once."""
    return flight.reuse is not None or flight.started_at is not None


def guessed_tokens(request: Request) -> int:
    """Estimate the number of tokens of the request's prompt or texts."""
    if not isinstance(request, Generate):
        return 1 + memoryview(request.texts).nbytes // BYTES_PER_TOKEN
    if request.tokens is not None:
        return len(request.tokens)
    prompt = (request.prompt or "").encode(errors="replace")
    return 1 + (packed_bytes(request) + len(prompt)) // BYTES_PER_TOKEN


def _within(ready: Ready, request: Request, tokens: int) -> int:
    """Return the tokens that a prompt can take from the others: at most the context, or it is refused."""
    return (
        min(tokens, ready.context_length)
        if isinstance(request, Generate) and ready.context_length
        else tokens
    )


def _prompt_tokens(flight: Flight) -> int:
    if not flight.prompt_tokens:
        flight.prompt_tokens = guessed_tokens(flight.request)
    return flight.prompt_tokens


def _whole(seconds: float) -> float:
    # Floating-point error must not add a second.
    return min(RETRY_AFTER_S_MAX, max(1.0, math.ceil(seconds - 1e-6)))


def _listed(label: str, ids: Sequence[str], count: int) -> str:
    if not ids:
        return ""
    more = f" and {count - len(ids)} more" if count > len(ids) else ""
    return f" {label}: {', '.join(ids)}{more}."


# --- Lower bound of a prompt's tokens by its bytes, to refuse what cannot fit before it is sent ------
#
# A worker reports the most bytes, apart from white space, that one token of its tokenizer can stand for. Only
# text counts that is certain to be in the prompt: a raw prompt, or the last message if it is the user's. A
# chat template may drop earlier messages, and may strip white space.

_split: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_read: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
_WHITE_SPACE += "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


def check_prompt(request: Request, ready: Ready) -> None:
    """Raise `RequestError(context_length_exceeded)` if a prompt certainly exceeds the worker's context."""
    if not isinstance(request, Generate) or request.tokenizing is not None or request.tokens is not None:
        return
    bytes_max = ready.token_bytes_max * ready.context_length
    size = packed_bytes(request) + 4 * len(request.prompt or "")
    if not bytes_max or size <= bytes_max:
        return
    tokens = sum(map(_solid_bytes, _certain_texts(request))) // ready.token_bytes_max
    if tokens > ready.context_length:
        source = request.source or ("prompt" if request.messages is UNSET else "messages")
        raise too_long(ready.context_length, tokens, source, by_memory=False, is_partial=True)


def _certain_texts(request: Generate) -> Iterator[str]:
    """Yield the texts that are in the prompt whatever the chat template. Malformed ones are the worker's to
    refuse."""
    if request.messages is UNSET:
        yield request.prompt or ""
        return
    try:
        messages = _split.decode(request.messages)
        last = _read.decode(messages[-1]) if messages else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return
    if not isinstance(last, dict) or last.get("role") != "user":
        return
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            yield text


def _solid_bytes(text: str) -> int:
    """Return the number of bytes of a text without white space."""
    blank_bytes = sum(text.count(blank) * len(blank.encode()) for blank in _WHITE_SPACE)
    return len(text.encode(errors="replace")) - blank_bytes
