"""What the routes work with."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from broker.config import MEDIA_MEMORY, GatewaySettings
from broker.dialects.responses.answer import Answer
from broker.dialects.responses.store import Store
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.inspection import Inspection
from broker.dispatch.tally import Tally
from broker.http.aside import Aside
from broker.http.auth import Keyring
from broker.http.limits import Shares
from broker.http.media import MediaMemory

Fetch = Callable[[str, Callable[[int], None]], Awaitable[bytes]]
"""See `broker.http.fetching`, which is there only where it is needed."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as routes see them; put together in `__main__`.

    `line_errors`: what went wrong on the line to the workers, counted as it goes. `answering`: the responses
    that run, by the key that asked for them and their id. `fetch`: how images from elsewhere are; None: they
    are not. `watchers`: who has the status told all along. `inspection`:
    None: nothing is kept to be looked into.
    """

    settings: GatewaySettings
    dispatcher: Dispatcher
    line_errors: Mapping[str, int]
    keyring: Keyring = field(default_factory=Keyring)
    shares: Shares = field(default_factory=Shares)
    responses: Store = field(default_factory=lambda: Store(0, 0))
    answering: dict[tuple[bytes, str], Answer] = field(default_factory=dict)
    aside: Aside = field(default_factory=Aside)
    tally: Tally = field(default_factory=Tally)
    watchers: set[object] = field(default_factory=set)
    inspection: Inspection | None = None
    media: MediaMemory = field(default_factory=lambda: MediaMemory(MEDIA_MEMORY))
    fetch: Fetch | None = None
    started_at: float = field(default_factory=time.monotonic)


def gateway_of(request: Request) -> Gateway:
    """The gateway that this request has come to."""
    gateway: Gateway = request.app.state.gateway
    return gateway
