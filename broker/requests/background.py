"""Responses in the background: queued at once, run when a row is free, read by their id."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp

from broker.answers.answer import Answer, AnswerObserver
from broker.api.rendering import ResponseRendering
from broker.api.responses.answer import ResponseBuilder
from broker.api.responses.store import StoredItems
from broker.dialects.body import encode, refuse
from broker.dialects.parameters import PRIORITY_RANGE
from broker.dialects.renderers import Renderer
from broker.dispatch.deferred import WorkSource
from broker.dispatch.fleet import Target
from broker.middleware.context import context_of
from broker.requests import durable
from broker.requests.answer_response import AnswerResponse, StreamCursor
from broker.requests.durable import Described, clock_of, keeper
from broker.requests.generation import configured, open_flights
from broker.requests.streams import number_in
from broker.state import GatewayState, gateway_of
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import BACKGROUND_PRIORITY

log = logging.getLogger(__name__)

BACKGROUND_MAX, WAIT_S_MAX = 16_384, 86_400.0
"""Maximum number of responses that wait, and the longest wait in seconds."""

Name = tuple[str, str]
"""Owner and id of a response."""


def begin(
    asked: Request,
    target: Target,
    message: Generate,
    frames: list[bytes],
    rendering: ResponseRendering,
    described: Described,
    body_bytes: int,
) -> ASGIApp:
    """Queue a response and return it, or its events if it is streamed. Raises `RequestError`."""
    gateway, context = gateway_of(asked), context_of(asked)
    if gateway.deferred.responses >= BACKGROUND_MAX:
        refusal = f"{BACKGROUND_MAX} responses are queued in the background already."
        raise RequestError(Code.TEXT_GENERATION_BUSY, refusal, retry_after_s=60.0)
    low = min(message.priority + BACKGROUND_PRIORITY, PRIORITY_RANGE[1])
    requests = configured(gateway, context, target, [replace(message, priority=low)])
    answer = context.answer or gateway.answers.new(context.owner)
    answer.in_background, answer.nbytes = True, body_bytes + sum(map(len, frames))
    builder = rendering.builder(clock_of(answer), keeper(gateway, context.owner, described))
    renderer = introduce(gateway, answer, rendering, builder, described.before)
    recorder = durable.record(gateway, answer, described, requests, frames, target.model)
    answer.begin(renderer)

    def start() -> None:
        open_flights(asked, target, requests, frames, answer, renderer)
        if recorder is not None:
            recorder.opened()

    defer(gateway, answer, target.model, start)
    return AnswerResponse(answer, gateway.settings.keepalive_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    answer: Answer
    start: Callable[[], None]
    since: float

    def begin(self) -> bool:
        """Start it unless it is over. Raises `RequestError` if it has to wait on."""
        try:
            if not self.answer.over:
                self.start()
        except RequestError as error:
            if error.kind.retryable:
                raise
            self._fail(error)
        return True

    def is_over(self, now: float) -> bool:
        """Return whether it was cancelled, or fails now because it waited for too long."""
        if not self.answer.over and now - self.since > WAIT_S_MAX:
            self._fail(RequestError(Code.WORKER_UNAVAILABLE, "No row was free for a day."))
        return self.answer.over

    def _fail(self, error: RequestError) -> None:
        log.info("the queued response %s fails: %s", self.answer.name, error.message)
        self.answer.refuse(error)


def defer(gateway: GatewayState, answer: Answer, model: str, start: Callable[[], None]) -> None:
    """Let a response wait for a free row. `start` opens its flights, or raises `RequestError`."""
    queue, name = gateway.deferred, (model, answer.owner)
    if name not in queue.sources:
        queue.sources[name] = WorkSource(_Waiting.begin, lambda each: each.since, model, _Waiting.is_over)
    queue.sources[name].waiting.append(_Waiting(answer, start, queue.clock()))
    queue.pump()


def introduce(
    gateway: GatewayState,
    answer: Answer,
    rendering: ResponseRendering,
    builder: ResponseBuilder,
    before: Sequence[StoredItems],
) -> Renderer:
    """Let a response in the background be found by its id. Return its renderer."""
    answer.inputs = lambda: [item for piece in before for item in piece.items()]
    if not rendering.stream:
        answer.whole = encode(builder.so_far())
    gateway.answers.name(answer, rendering.id)
    register(gateway, (answer.owner, rendering.id), answer, builder)
    return rendering.of(builder)


class _Registration(AnswerObserver):
    """Entry of a running response, until it is over."""

    def __init__(self, answering: dict[Name, ResponseBuilder], name: Name) -> None:
        self._answering = answering
        self._name = name

    def on_over(self, answer: Answer) -> None:
        self._answering.pop(self._name).on_cancel = lambda: None


def register(gateway: GatewayState, name: Name, answer: Answer, builder: ResponseBuilder) -> None:
    """Let the response be found and cancelled by its id until it is over; then the store has it."""
    if not answer.over:
        gateway.answering[name] = builder
        builder.on_cancel = answer.poke
        answer.observe(_Registration(gateway.answering, name))


async def events(gateway: GatewayState, name: Name, starting_after: str | None) -> ASGIApp:
    """Return the events of a response in the background, after the one with that number. Raises
    `RequestError` if they are not kept, or never were."""
    skipped = 0 if starting_after is None else number_in("starting_after", starting_after) + 1
    answer = gateway.answers.find(*name)
    if answer is not None and answer.in_background:
        return AnswerResponse(answer, gateway.settings.keepalive_s, StreamCursor(skipped))
    if (await gateway.responses.get(*name)).document()["background"]:
        raise RequestError(Code.STREAM_CURSOR_EXPIRED)
    raise refuse("stream", "must be false here: this response is not in the background")


def forget(gateway: GatewayState, name: Name) -> None:
    """Drop the events of a response that is deleted."""
    if (answer := gateway.answers.find(*name)) is not None:
        gateway.answers.drop(answer)
