"""What the routes work with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from broker.config import GatewaySettings
from broker.dialects.responses.answer import Answer
from broker.dialects.responses.store import Store
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.tally import Tally
from broker.http.aside import Aside
from broker.http.auth import Keyring
from broker.http.limits import Shares


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as routes see them; put together in `__main__`.

    `line_errors`: what went wrong on the line to the workers, counted as it goes. `answering`: the responses
    that run, by the key that asked for them and their id. `watchers`: who has the status told all along.
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
    started_at: float = field(default_factory=time.monotonic)


def gateway_of(request: Request) -> Gateway:
    """The gateway that this request has come to."""
    gateway: Gateway = request.app.state.gateway
    return gateway
