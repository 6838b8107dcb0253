"""`python -m broker`: the gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from types import FrameType

import uvicorn
import zmq

from broker.admission import Admission
from broker.app import Gateway, create_app
from broker.config import GatewaySettings
from broker.dispatch import Dispatcher
from broker.fleet import Fleet
from broker.link import Link
from protocol import lifeline, logs, settings, sockets
from protocol.messages import new_incarnation

log = logging.getLogger("broker")

BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn with an orderly end: no new requests, time for open streams, then a last event for each."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        dispatcher = self._gateway.dispatcher
        if not dispatcher.stopping:
            log.info("stopping: %d requests in flight", len(dispatcher.flights))
            dispatcher.stop()
            loop = asyncio.get_running_loop()
            loop.call_later(self._gateway.settings.drain_timeout_s, dispatcher.abandon)
        super().handle_exit(sig, frame)


def build(configured: GatewaySettings) -> Gateway:
    """The gateway's parts, joined. Raises `sockets.EndpointError` or `zmq.ZMQError`."""
    endpoint = configured.endpoint or sockets.default_endpoint(configured.port)
    link = Link(endpoint, configured.curve_keys)
    dispatcher = Dispatcher(
        incarnation=new_incarnation(),
        fleet=Fleet(silent_after_s=configured.silent_after_s, stall_timeout_s=configured.stall_timeout_s),
        admission=Admission(waiting_max=configured.max_waiting),
        send=link.send,
        clock=time.monotonic,
    )
    return Gateway(settings=configured, dispatcher=dispatcher, link=link)


def listen(host: str, port: int) -> socket.socket:
    """The HTTP socket, bound before anything else so that a taken port is said plainly. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def main() -> int:
    """Run until told to stop."""
    configured = settings.read_or_exit(
        GatewaySettings,
        "gateway",
        sys.argv[1:],
        os.environ,
        program="roundhouse gateway",
        about="Serve OpenAI-compatible HTTP in front of the workers that connect.",
    )
    logs.setup("gateway", configured.log_format, configured.log_level)
    lifeline.follow_parent()
    try:
        listener = listen(configured.host, configured.port)
    except OSError as error:
        settings.exit_with(
            "gateway", f"cannot listen on {configured.host}:{configured.port}: {error.strerror}"
        )
    try:
        gateway = build(configured)
    except (sockets.EndpointError, zmq.ZMQError, OSError) as error:
        settings.exit_with("gateway", f"cannot meet workers at {configured.endpoint}: {error}")
    log.info("listening at http://%s:%d/v1", configured.host, configured.port)
    server = Server(
        uvicorn.Config(
            create_app(gateway),
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(configured.drain_timeout_s) + 2,
        ),
        gateway,
    )
    # uvicorn raises the signal that stopped it once more when all is done.
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
