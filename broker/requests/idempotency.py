"""`Idempotency-Key`: a request that is sent again joins the answer to the first one.

The key belongs to the API key that sent it. For the reattach window after the answer's end, or after its last
reader left, the same key with the same body gets the same bytes, computed once, from the first one on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from hashlib import sha256

from starlette.requests import Request
from starlette.types import ASGIApp

from broker.middleware.context import context_of, update_context
from broker.requests.answer_response import AnswerResponse
from broker.requests.generation import whole_body
from broker.requests.streams import name_in
from broker.state import gateway_of
from protocol.errors import Code, RequestError

HEADER = "Idempotency-Key"

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def keyed(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint that generates, so that retries of its requests join the first one's answer."""

    @wraps(endpoint)
    async def app(request: Request) -> ASGIApp:
        key = name_in(request, HEADER)
        return await (endpoint(request) if key is None else _join(request, key, endpoint))

    return app


async def _join(request: Request, key: str, endpoint: Endpoint) -> ASGIApp:
    gateway, owner = gateway_of(request), context_of(request).owner
    raw = await whole_body(request)
    digest = sha256(request.url.path.encode() + b"\n" + raw).digest()
    answer, is_new = gateway.answers.claim(owner, key, digest)
    if not is_new:
        return AnswerResponse(answer, gateway.settings.keepalive_s)
    update_context(request, body=raw, answer=answer)
    error: RequestError | None = RequestError(Code.INTERNAL_ERROR)
    try:
        response, error = await endpoint(request), None
    except RequestError as refusal:
        error = refusal
        raise
    finally:
        if error is not None:
            answer.fail(error)  # for those who have joined it meanwhile
            gateway.answers.drop(answer)
        if gateway.inspection is None:  # else the body is kept in any case
            update_context(request, body=None, answer=answer)
    return response
