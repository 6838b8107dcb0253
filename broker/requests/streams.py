"""Streams that are read on after their connection was lost, by their id or their client's conversation.

A stream is kept for that if its request has an idempotency key, or names a conversation as llama.cpp's
clients do. It is a durable answer; any other stream ends with its connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from broker.answers.answer import Answer
from broker.api.rendering import ChatRendering, MessageRendering, TextRendering
from broker.middleware.context import context_of, update_context
from broker.requests.answer_response import AnswerResponse, StreamCursor
from broker.state import GatewayState, gateway_of
from protocol.errors import Code, RequestError

CONVERSATION = "X-Conversation-Id"
_NAME = re.compile(r"[\x20-\x7e]{1,255}")


def name_in(request: Request, header: str) -> str | None:
    """Return a name that the client has chosen, from a header; None without. Raises `RequestError`."""
    given = request.headers.getlist(header)
    if not given:
        return None
    if len(given) > 1 or not _NAME.fullmatch(given[0]):
        message = f"'{header}' must be sent once, with 1 to 255 printable ASCII characters."
        raise RequestError(Code.INVALID_REQUEST, message, param=header)
    return given[0]


def number_in(param: str, given: str) -> int:
    """Return the number that a parameter has. Raises `RequestError`."""
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise RequestError(
            Code.INVALID_REQUEST, f"'{param}' must be a number of at most 9 digits.", param=param
        )
    return int(given)


@contextmanager
def kept(request: Request, rendering: ChatRendering | TextRendering | MessageRendering) -> Iterator[None]:
    """Let the stream that is opened inside be read on, if its request asks for it. Raises `RequestError`."""
    context, answers = context_of(request), gateway_of(request).answers
    is_named = rendering.stream and request.headers.get(CONVERSATION) and not context.is_batch_line
    conversation = name_in(request, CONVERSATION) if is_named else None
    answer = context.answer
    if answer is None and conversation:
        answer = answers.new(context.owner)
        update_context(request, body=context.body, answer=answer)
    if answer is not None and rendering.stream:
        answers.name(answer, rendering.id, conversation or "", rendering.created)
    try:
        yield
    except RequestError:
        if answer is not None and context.answer is None:
            answers.drop(answer)
        raise


def found(gateway: GatewayState, answer: Answer | None, id: str, cursor: StreamCursor) -> ASGIApp:
    """Return the rest of a stream. Raises `RequestError` if there is none with this id."""
    if answer is None:
        message = (
            f"There is no stream {id[:128]!r} to read on. It is kept if its request had an Idempotency-Key or"
            f" {CONVERSATION}, until {gateway.settings.reattach_window_s:g} s after its end."
        )
        raise RequestError(Code.RESPONSE_NOT_FOUND, message, param="id")
    gateway.answers.counts["joined"] += 1
    return AnswerResponse(answer, gateway.settings.keepalive_s, cursor)


def listed(gateway: GatewayState, owner: str, conversations: Iterable[str]) -> list[dict[str, Any]]:
    """Return the latest streams of an owner's conversations, each perhaps followed by `::model`, as objects
    of llama.cpp's API."""
    answers, wanted = gateway.answers, set(conversations)
    found = [answer for answer in answers if wanted & _names(answer)]
    return [_object(each) for each in found if answers.find(owner, each.conversation, "conversation") is each]


def _names(answer: Answer) -> set[str]:
    return {answer.conversation, answer.conversation.partition("::")[0]} if answer.conversation else set()


def _object(answer: Answer) -> dict[str, Any]:
    end = answer.end
    return {
        "conversation_id": answer.conversation,
        "is_done": end is not None,
        "total_bytes": sum(map(len, answer.chunks)),
        "started_at": answer.created,
        "completed_at": 0 if end is None else int(time.time() - (time.monotonic() - end.at)),
    }


def route(path: str, prefix: str) -> Route:
    """Make the route by which an API's streams are read on. `prefix`: of its ids."""
    return Route(f"{path}/{{id}}/stream", _reader(prefix), methods=["GET"])


def _reader(prefix: str) -> Callable[[Request], Awaitable[ASGIApp]]:
    async def read_on(request: Request) -> ASGIApp:
        """Return the events behind those that the client has, to the stream's end."""
        gateway, id = gateway_of(request), request.path_params["id"]
        cursor = StreamCursor(number_in("starting_after", request.query_params.get("starting_after", "0")))
        answer = gateway.answers.find(context_of(request).owner, id) if id.startswith(prefix) else None
        return found(gateway, answer, id, cursor)

    return read_on
