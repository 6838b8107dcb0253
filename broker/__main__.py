"""`python -m broker`: the gateway process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import zmq
from starlette.types import ASGIApp

from broker.app import create_app
from broker.config import GatewaySettings
from broker.dialects.hosts import Hosts
from broker.dialects.responses.store import Store
from broker.dispatch.admission import Admission
from broker.dispatch.dispatcher import Dispatcher, Timeouts
from broker.dispatch.fleet import Fleet
from broker.dispatch.inspection import Inspection
from broker.dispatch.routing import Routing
from broker.http.auth import Keyring, KeysError
from broker.http.limits import Shares
from broker.http.listeners import ListenError, check_exposure, open_listeners, url
from broker.http.media import MediaMemory
from broker.http.server import Server, server_config
from broker.line.caffeine import Caffeine, program
from broker.line.foreman import Foreman
from broker.line.link import Link
from broker.routes.gateway import Fetch, Gateway
from protocol import lifeline, logs, settings, sockets
from protocol.messages import new_incarnation

if TYPE_CHECKING:
    from broker.http.fetching import Network

log = logging.getLogger("broker")

SPARSE = ("broker.dispatch",)
"""Whose lines are sparse at every level: workers come and go a few times a minute, or something is wrong."""


def build(
    configured: GatewaySettings, keyring: Keyring, fetch: Fetch | None = None
) -> tuple[Gateway, ASGIApp]:
    """The gateway's parts, joined. Raises `sockets.EndpointError` or `zmq.ZMQError`."""
    endpoint = configured.endpoint or sockets.default_endpoint(configured.port)
    link = Link(endpoint, configured.curve_keys, join=configured.join)
    foreman = Foreman.find(os.environ)
    dispatcher = Dispatcher(
        incarnation=new_incarnation(),
        fleet=Fleet(silent_after_s=configured.silent_after_s, stall_timeout_s=configured.stall_timeout_s),
        admission=Admission(
            clock=time.monotonic,
            waiting_max=configured.max_waiting,
            waiting_tokens_max=configured.max_waiting_tokens,
        ),
        send=link.send,
        clock=time.monotonic,
        timeouts=Timeouts(
            failover_s=configured.failover_timeout_s,
            load_s=configured.load_timeout_s,
            hung_s=configured.hung_timeout_s,
            unload_after_s=configured.unload_after_s,
        ),
        end=link.end,
        tell=foreman.tell if foreman else None,
        routing=Routing(time.monotonic, configured.routing),
        host=os.uname().nodename,
    )
    gateway = Gateway(
        settings=configured,
        dispatcher=dispatcher,
        line_errors=link.errors,
        keyring=keyring,
        shares=Shares(configured.max_per_key),
        responses=Store(configured.responses_max, configured.responses_bytes_max),
        media=MediaMemory(configured.media_memory),
        fetch=fetch,
        inspection=Inspection() if configured.inspect else None,
    )
    return gateway, create_app(gateway, link, foreman, _caffeine(configured.keep_awake))


def _caffeine(wanted: bool | None, platform: str = sys.platform) -> Caffeine | None:
    """None: the machine sleeps when it likes to."""
    if not (platform == "darwin" if wanted is None else wanted):
        return None
    command = program(platform, os.getpid())
    if command is None:
        log.warning("the machine cannot be kept awake: no program for it is there")
    return Caffeine(command) if command else None


def fetcher(configured: GatewaySettings, network: Network | None) -> Fetch | None:
    """How images from elsewhere are fetched; None: they are not. Raises ValueError for what is no host."""
    if not configured.allow_media_hosts:
        return None
    # Its HTTP client takes as long to import as the half of all the rest: only where it is used.
    from broker.http.fetching import Fetcher, Internet

    hosts = Hosts(configured.allow_media_hosts)
    return Fetcher(hosts, network or Internet(), bytes_max=configured.media_bytes_max)


def main(network: Network | None = None) -> int:
    """Run until told to stop. `network`: where images are fetched from, for tests; None: the internet."""
    configured = settings.read_or_exit(
        GatewaySettings,
        "gateway",
        sys.argv[1:],
        os.environ,
        program="roundhouse gateway",
        about="Serve OpenAI-compatible HTTP in front of the workers that connect.",
    )
    logs.setup("gateway", configured.log_format, configured.log_level, SPARSE)
    lifeline.follow_parent()
    try:
        fetch = fetcher(configured, network)
    except ValueError as error:
        settings.exit_with("gateway", f"allow_media_hosts: {error}")
    try:
        listeners = open_listeners(configured.host, configured.port, os.environ, os.getpid())
        keyring = Keyring(configured.api_keys, configured.api_keys_file)
        check_exposure(listeners, keyring, configured.insecure_no_keys)
    except (ListenError, KeysError, OSError) as error:
        settings.exit_with("gateway", error)
    try:
        gateway, app = build(configured, keyring, fetch)
    except (sockets.EndpointError, zmq.ZMQError, OSError) as error:
        settings.exit_with("gateway", f"cannot meet workers at {configured.endpoint}: {error}")
    for listener in listeners:
        log.info("listening at %s/v1", url(listener))
    server = Server(server_config(app, configured), gateway.dispatcher, configured.drain_timeout_s)
    # uvicorn raises the signal that stopped it once more when all is done.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(listeners)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
