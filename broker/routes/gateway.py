"""What the routes work with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from broker.config import GatewaySettings
from broker.dispatch.dispatcher import Dispatcher
from broker.http.aside import Aside
from broker.http.auth import Keyring
from broker.http.limits import Shares


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as routes see them; put together in `__main__`.

    `line_errors`: what went wrong on the line to the workers, counted as it goes.
    """

    settings: GatewaySettings
    dispatcher: Dispatcher
    line_errors: Mapping[str, int]
    keyring: Keyring = field(default_factory=Keyring)
    shares: Shares = field(default_factory=Shares)
    aside: Aside = field(default_factory=Aside)
    started_at: float = field(default_factory=time.monotonic)


def gateway_of(request: Request) -> Gateway:
    """The gateway that this request has come to."""
    gateway: Gateway = request.app.state.gateway
    return gateway
