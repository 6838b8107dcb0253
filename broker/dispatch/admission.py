"""Admitted, or refused at once with a reason and a time to come back. Pure, the clock handed in.

A request finds room by number and by size. By number: a worker's rows, and so many more that wait. By size:
the prompts that wait are at most a few times what the worker's memory holds, so that long ones do not queue
for hours, nor fill the memory of both processes with text and tokens. Who finds nobody waiting is never too
long here: whether it fits at all is for its worker to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from broker.dispatch.flight import Flight
from protocol.conversation import packed_bytes
from protocol.errors import Code, RequestError
from protocol.messages import Generate, Ready, Request

RETRY_AFTER_S_MAX = 120.0
WAITING_TURNS = 4
"""How often the tokens that a worker's memory holds may wait for it, where no other limit is set."""
BYTES_PER_TOKEN = 4
"""Of most texts in most vocabularies: for a prompt that its worker has not counted yet."""
_NAMED_MAX = 16
_SMOOTHING = 0.2


class Admission:
    """How much a worker may have aboard, and how fast it has been finishing it."""

    def __init__(
        self, *, clock: Callable[[], float], waiting_max: int, waiting_tokens_max: int | None = None
    ) -> None:
        """`waiting_tokens_max`: None: `WAITING_TURNS` times what the worker's memory holds."""
        self._clock = clock
        self._waiting_max = waiting_max
        self._waiting_tokens_max = waiting_tokens_max
        self._service_s: float | None = None
        self._promised_until = -math.inf

    def check(self, aboard: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> None:
        """May these come to a worker beside those aboard, all or none?

        Raises `RequestError(text_generation_busy)`, or `invalid_request` where there would never be room.
        """
        self._check_number(aboard, ready, len(requests))
        self._check_size(aboard, ready, requests)

    def has_room(self, aboard: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> bool:
        """Would `check` have these come?"""
        return (
            self._fits_number(aboard, ready, len(requests)) and self._lacking(aboard, ready, requests) is None
        )

    def is_full(self, aboard: Sequence[Flight], ready: Ready) -> bool:
        """Would it be too much to have any request more, whatever it asks?"""
        return len(aboard) >= ready.running_max + self._waiting_max

    def _check_number(self, aboard: Sequence[Flight], ready: Ready, asked: int) -> None:
        room = ready.running_max + self._waiting_max
        if self._fits_number(aboard, ready, asked):
            return
        if asked > max(room, 1):
            message = f"{asked} answers to one request are asked for, and this server has room for {room}."
            raise RequestError(Code.INVALID_REQUEST, message, param="n")
        raise self.busy(aboard)

    def _fits_number(self, aboard: Sequence[Flight], ready: Ready, asked: int) -> bool:
        return len(aboard) + asked <= ready.running_max + self._waiting_max

    def _check_size(self, aboard: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> None:
        if (why := self._lacking(aboard, ready, requests)) is not None:
            raise self.busy(aboard, why)

    def _lacking(self, aboard: Sequence[Flight], ready: Ready, requests: Sequence[Request]) -> str | None:
        """Why the prompts are too many tokens beside those that wait; None: they are not."""
        most = self._tokens_max(ready)
        waiting = [flight for flight in aboard if not has_begun(flight)]
        if most is None or not waiting:
            return None
        held = sum(_prompt_tokens(flight) for flight in waiting)
        asked = sum(guessed_tokens(request) for request in requests)
        if held + asked <= most:
            return None
        return f"The prompts that wait have {held} tokens, and about {asked} more are over {most}"

    def _tokens_max(self, ready: Ready) -> int | None:
        if self._waiting_tokens_max is not None:
            return self._waiting_tokens_max
        return WAITING_TURNS * ready.tokens_max or None

    def busy(self, aboard: Sequence[Flight], why: str = "The server is at capacity") -> RequestError:
        """The refusal of a request beside those aboard: who runs, who waits, and when to come back."""
        running: list[Flight] = []
        waiting: list[Flight] = []
        for flight in aboard:
            (running if has_begun(flight) else waiting).append(flight)
        running_ids, waiting_ids = (
            [flight.id for flight in some[:_NAMED_MAX]] for some in (running, waiting)
        )
        return RequestError(
            Code.TEXT_GENERATION_BUSY,
            f"{why}: {len(running)} requests are running and {len(waiting)} are waiting."
            f"{_listed('Running', running_ids, len(running))}{_listed('Waiting', waiting_ids, len(waiting))}",
            retry_after_s=self._promise_s(len(aboard)),
            details={
                "running": len(running),
                "waiting": len(waiting),
                "running_ids": running_ids,
                "waiting_ids": waiting_ids,
            },
        )

    # --- when to come back ---

    def served(self, duration_s: float) -> None:
        """A request finished after so long; the average forgets old ones."""
        if self._service_s is None:
            self._service_s = duration_s
        else:
            self._service_s += _SMOOTHING * (duration_s - self._service_s)

    def retry_after_s(self, aboard: int) -> float:
        """When one of those aboard can be expected to have made room, in whole seconds, at least 1.

        A request's measured time in the house contains its wait, so the time between two departures is
        that time divided by those aboard (Little's law).
        """
        return _whole((self._service_s or 0.0) / max(aboard, 1))

    def _promise_s(self, aboard: int) -> float:
        """The same for one of many who are sent away: the places that get free are promised one by one, or
        all would come back for the first of them. Never later than all who are aboard now can be expected to
        have left."""
        now, service_s = self._clock(), self._service_s or 0.0
        promised = max(now, self._promised_until) + service_s / max(aboard, 1)
        self._promised_until = min(promised, now + service_s)
        return _whole(self._promised_until - now)


def has_begun(flight: Flight) -> bool:
    """Has the worker taken it out of its queue? What was reused is said then, before the first token."""
    return flight.reuse is not None or flight.started_at is not None


def guessed_tokens(request: Request) -> int:
    """About as many tokens as its prompt has, or its texts."""
    if not isinstance(request, Generate):
        return 1 + memoryview(request.texts).nbytes // BYTES_PER_TOKEN
    if request.tokens is not None:
        return len(request.tokens)
    prompt = (request.prompt or "").encode(errors="replace")
    return 1 + (packed_bytes(request) + len(prompt)) // BYTES_PER_TOKEN


def _prompt_tokens(flight: Flight) -> int:
    if not flight.prompt_tokens:
        flight.prompt_tokens = guessed_tokens(flight.request)
    return flight.prompt_tokens


def _whole(seconds: float) -> float:
    # What is left of a sum of fractions must not cost a second.
    return min(RETRY_AFTER_S_MAX, max(1.0, math.ceil(seconds - 1e-6)))


def _listed(label: str, ids: Sequence[str], count: int) -> str:
    if not ids:
        return ""
    more = f" and {count - len(ids)} more" if count > len(ids) else ""
    return f" {label}: {', '.join(ids)}{more}."
