"""Request context: the facts of one request, and all of them that its scope has."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.answers.answer import Answer
from broker.dialects.sessions import NO_SESSION, SessionName, name_session
from broker.middleware.media_memory import MediaLease, MediaMemory
from protocol.common.api_keys import ApiKey

CONTEXT = "roundhouse"
"""Key of the context in a request's scope."""
HEADER = b"x-request-id"
ANTHROPICS = b"request-id"
"""Name of the header in Anthropic's API."""
BATCHES = "batches"
"""Name under which the lines of all batches take their turns in a worker's preparation queue."""
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")
_SALT = secrets.token_bytes(16)
"""Of this process: a client's name reveals neither a key nor an address, and means nothing elsewhere."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Request context: a value; what is learned later makes a new one, by `update_context`."""

    id: str
    """Sent back to the client, so that the request can be found in the log."""
    media: MediaLease
    """Lease of its images and videos, until its response has been sent."""
    host: str = ""
    """The client's address; empty for none."""
    key: ApiKey | None = None
    """Its API key; None where none is required."""
    is_batch_line: bool = False
    """Whether it is a line of a batch. These have the lowest priority, do not count for the limits of
    interactive requests, and are not stored as responses: the batch has their results."""
    body: bytes | None = None
    """Its body, if that was read before its endpoint runs, or is captured by an inspection."""
    session: SessionName = NO_SESSION
    """The session that its headers name."""
    answer: Answer | None = None
    """The durable answer that its idempotency key stands for; None: it has no key."""

    @property
    def owner(self) -> str:
        """The owner of all that is stored for the request: the name of its key, hashed, or else the key.

        Keys of one name are one owner, and all requests without a key.
        """
        return "" if self.key is None else self.key.prefix_namespace

    @property
    def client(self) -> str:
        """Opaque name of the client, by which workers prepare the requests of several clients in turn.

        Unlike `owner` it differs for keys of one name, and for addresses without a key.
        """
        if self.is_batch_line:
            return BATCHES
        identity = self.host.encode(errors="replace") if self.key is None else self.key.digest
        return hashlib.blake2b(identity, digest_size=8, key=_SALT).hexdigest()


def context_of(request: Mapping[str, Any]) -> RequestContext:
    """Return the context of a request or its scope, which has passed `RequestContextMiddleware`."""
    context: RequestContext = request[CONTEXT]
    return context


def update_context(request: Request, *, body: bytes | None, answer: Answer | None) -> None:
    """Give a request a context with this body and answer."""
    request.scope[CONTEXT] = replace(context_of(request), body=body, answer=answer)


def request_id(scope: Scope) -> str:
    """Return the request's id; empty if it has not passed `RequestContextMiddleware`."""
    return context_of(scope).id if CONTEXT in scope else ""


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class RequestContextMiddleware:
    """ASGI middleware that gives each request its context, and frees its media at its end.

    It returns the client's request id, or a new one if that is missing or malformed.
    """

    def __init__(self, app: ASGIApp, media: MediaMemory) -> None:
        self._app = app
        self._media = media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        id = given if _SANE.fullmatch(given) else new_request_id().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HEADER, id), (ANTHROPICS, id)]
            await send(message)

        host = scope["client"][0] if scope.get("client") else ""
        with self._media.lease() as media:
            session = name_session(Headers(scope=scope))
            scope[CONTEXT] = RequestContext(id.decode(), media, host, session=session)
            await self._app(scope, receive, send_with_id)
