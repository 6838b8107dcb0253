"""`python -m broker`: the gateway process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from starlette.types import ASGIApp

from broker.api.batches.runner import BatchRunner, StoreThread
from broker.api.batches.store import BatchStore
from broker.api.files.routes import DAY_S
from broker.app import create_app
from broker.dialects.host_patterns import HostPatterns
from broker.dialects.media_hosts import AllowedHosts
from broker.dispatch.admission import Admission
from broker.dispatch.dispatcher import Dispatcher, Timeouts
from broker.dispatch.fleet import Fleet
from broker.dispatch.inspection import Inspection
from broker.dispatch.routing import Routing
from broker.middleware.auth import ApiKeys
from broker.middleware.limits import KeyConcurrency
from broker.middleware.media_memory import MediaMemory
from broker.server.server import ListenError, Server, open_listeners, server_config, url
from broker.state import Fetch, GatewayState, journal_at
from broker.transport.keep_awake import SleepInhibitor, program
from broker.transport.router import RouterLink
from broker.transport.supervisor_client import SupervisorClient
from protocol import lifeline, sockets
from protocol.common import gc_heap, logs
from protocol.common.api_keys import KeysError, check_exposure
from protocol.common.state_folder import batch_folder, journal_file
from protocol.messages import new_incarnation
from protocol.server_lock import OwnedError, ServerLock
from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings
from protocol.settings.job_status import exits_for_manager

if TYPE_CHECKING:
    from broker.requests.fetching import Network

log = logging.getLogger("broker")

SPARSE = ("broker.dispatch",)
"""Loggers that are rate-limited at every level: workers connect and leave a few times a minute, or something
is wrong."""


def build(
    configured: GatewaySettings,
    api_keys_store: ApiKeys,
    fetch: Fetch | None = None,
    supervisor: SupervisorClient | None = None,
) -> tuple[GatewayState, ASGIApp]:
    """Build and connect the gateway's components. Raises `OwnedError`, `sockets.EndpointError`, `OSError` or
    `zmq.ZMQError`."""
    # Under a supervisor, that owns the state. An endpoint of its own is part of no server's state.
    owns = supervisor is None and not configured.endpoint
    lock = ServerLock("roundhouse gateway", configured.host, configured.port) if owns else None
    endpoint = configured.endpoint or sockets.default_endpoint(configured.server)
    sockets.check_unused(endpoint)
    link = RouterLink(endpoint, configured.curve_keys, join=configured.join, lock=lock)
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
            orphan_s=configured.orphan_timeout_s,
        ),
        end=link.end,
        tell=supervisor.send_desired if supervisor else None,
        routing=Routing(time.monotonic, configured.routing),
        host=os.uname().nodename,
    )
    gateway = GatewayState(
        settings=configured,
        dispatcher=dispatcher,
        line_errors=link.errors,
        api_keys_store=api_keys_store,
        key_concurrency=KeyConcurrency(configured.max_per_key),
        media=MediaMemory(configured.media_memory),
        fetch=fetch,
        inspection=Inspection() if configured.inspect else None,
        batches=_batches(configured),
        journal=journal_at(_journal_path(configured), configured),
    )
    app = create_app(gateway, link, supervisor, _inhibitor(configured.keep_awake))
    return gateway, app


def _journal_path(settings: GatewaySettings) -> Path | None:
    """Return the journal's file; None if it is disabled."""
    if not settings.journal_max:
        return None
    try:
        file = journal_file(settings.journal_dir, os.environ, settings.server)
    except RuntimeError as error:
        log.warning("there is no journal, set --journal-dir: %s", error)
        return None
    folder, former = file.parent, file.parent.with_name(str(settings.port))
    if settings.journal_dir is None and not folder.exists() and former.exists():
        about = "earlier versions used %s for every address of this port (see --journal-dir, --batch-dir)"
        log.warning(f"%s is new; {about}", folder, former)
    return file


def _batches(settings: GatewaySettings) -> BatchRunner | None:
    """Return the runner of batches; None if they are disabled."""
    if not settings.batch_storage:
        return None
    try:
        folder = settings.batch_dir or batch_folder(os.environ, settings.server)
    except RuntimeError as error:
        log.warning("batches are disabled, set --batch-dir: %s", error)
        return None
    return BatchRunner(
        StoreThread(BatchStore(folder, settings.batch_storage)),
        time.time,
        line_bytes_max=settings.body_bytes_max,
        retention_s=settings.batch_days * DAY_S,
    )


def _inhibitor(wanted: bool | None, platform: str = sys.platform) -> SleepInhibitor | None:
    """Return the sleep inhibitor; None if the machine may sleep."""
    if not (platform == "darwin" if wanted is None else wanted):
        return None
    command = program(platform, os.getpid())
    if command is None:
        log.warning("cannot keep the machine awake: no program for it is installed")
    return SleepInhibitor(command) if command else None


def fetcher(configured: GatewaySettings, network: Network | None) -> Fetch | None:
    """Return the fetcher of remote images; None if no host is allowed. Raises `ValueError` for an invalid
    host."""
    if not configured.allow_media_hosts:
        return None
    # Its HTTP client adds half to the import time of everything else, so it is imported only if used.
    from broker.requests.fetching import Fetcher, Internet

    hosts = AllowedHosts(configured.allow_media_hosts)
    return Fetcher(hosts, network or Internet(), bytes_max=configured.media_bytes_max)


@exits_for_manager()
def main(network: Network | None = None) -> int:
    """Run until a signal arrives. `network`: replaces the internet for media fetches, in tests."""
    supervisor = SupervisorClient.find(os.environ)
    configured = settings.read_or_exit(
        GatewaySettings,
        "gateway",
        sys.argv[1:],
        os.environ,
        program="roundhouse gateway",
        about="Serve the OpenAI-compatible HTTP API for the connected workers.",
        document=None if supervisor is None or sys.argv[1:] else supervisor.read_settings(),
    )
    logs.setup("gateway", configured.log_format, configured.log_level, SPARSE)
    lifeline.follow_parent()
    try:
        fetch = fetcher(configured, network)
    except ValueError as error:
        settings.exit_with("gateway", f"allow_media_hosts: {error}")
    try:
        HostPatterns(configured.allowed_hosts)
    except ValueError as error:
        settings.exit_with("gateway", f"allowed_hosts: {error}")
    try:
        listeners = open_listeners(configured.host, configured.port, os.environ, os.getpid())
        api_keys_store = ApiKeys(configured.api_keys, configured.api_keys_file)
        if not api_keys_store.required and not configured.insecure_no_keys:
            check_exposure(listener.getsockname()[0] for listener in listeners)
    except (ListenError, KeysError, OSError) as error:
        settings.exit_with("gateway", error)
    try:
        gateway, app = build(configured, api_keys_store, fetch, supervisor)
    except OwnedError as error:
        settings.exit_with("gateway", f"the state of this address belongs to {error}")
    except (sockets.EndpointError, zmq.ZMQError, OSError) as error:
        settings.exit_with(
            "gateway",
            f"cannot listen for workers at {configured.endpoint or 'the default endpoint'}: {error}",
        )
    for listener in listeners:
        log.info("listening at %s/v1", url(listener))
    config = server_config(app, configured, gateway.http_counters)
    server = Server(config, gateway.dispatcher, configured.drain_timeout_s)

    def on_started() -> None:
        if supervisor is not None:
            supervisor.is_serving = True
            gateway.dispatcher.catalogue.update()

    server.on_started = on_started
    gc_heap.freeze()
    # uvicorn raises the signal that stopped it again after the shutdown.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(listeners)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
