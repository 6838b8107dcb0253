"""`python -m broker`: the gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence
from types import FrameType

import uvicorn
import zmq
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from broker.app import Gateway, create_app
from broker.config import GatewaySettings
from broker.dispatch.admission import Admission
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import Fleet
from broker.http.auth import Keyring, KeysError
from broker.http.connection import Limits, available_connections, connection_type
from broker.http.limits import Shares
from broker.line.foreman import Foreman
from broker.line.link import Link
from protocol import lifeline, logs, settings, sockets
from protocol.messages import new_incarnation

log = logging.getLogger("broker")

BACKLOG = 2048
FIRST_REQUEST_S_MAX = 1.0
_LOOKS = 100
FIRST_HANDED_OVER = 3
"""The number of the first descriptor that a service manager hands over, says sd_listen_fds(3)."""


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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn hangs up on whoever has not asked yet: those who have just connected may, for a moment."""
        for server in self.servers:
            server.close()
        for _ in range(_LOOKS):
            if not any(_is_fresh(connection) for connection in self.server_state.connections):
                break
            await asyncio.sleep(FIRST_REQUEST_S_MAX / _LOOKS)
        await super().shutdown(sockets)


def _is_fresh(connection: object) -> bool:
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is None


def build(configured: GatewaySettings, keyring: Keyring) -> Gateway:
    """The gateway's parts, joined. Raises `sockets.EndpointError` or `zmq.ZMQError`."""
    endpoint = configured.endpoint or sockets.default_endpoint(configured.port)
    link = Link(endpoint, configured.curve_keys)
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
        failover_timeout_s=configured.failover_timeout_s,
        load_timeout_s=configured.load_timeout_s,
        hung_timeout_s=configured.hung_timeout_s,
        unload_after_s=configured.unload_after_s,
        kill=kill if endpoint.startswith("ipc:") else None,
        tell=foreman.tell if foreman else None,
    )
    shares = Shares(configured.max_per_key)
    return Gateway(
        settings=configured,
        dispatcher=dispatcher,
        link=link,
        keyring=keyring,
        shares=shares,
        foreman=foreman,
    )


def check_exposure(listeners: Sequence[socket.socket], keyring: Keyring, insecure_no_keys: bool) -> None:
    """Raises `KeysError` where others can reach us, and nobody needs a key."""
    hosts = [listener.getsockname()[0] for listener in listeners]
    exposed = [host for host in hosts if not sockets.is_loopback(host)]
    if exposed and not keyring.required and not insecure_no_keys:
        raise KeysError(
            f"{exposed[0]} can be reached from other machines and there are no API keys: set --api-keys-file "
            "(or ROUNDHOUSE_API_KEYS), listen on 127.0.0.1, or say --insecure-no-keys"
        )


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves the application."""
    configured = gateway.settings
    connections_max = available_connections(configured.max_connections)
    if connections_max < configured.max_connections:
        log.warning("%d connections at the most: the system gives no more descriptors", connections_max)
    return uvicorn.Config(
        create_app(gateway),
        loop="uvloop",
        http=connection_type(Limits(connections_max, configured.body_timeout_s, configured.read_timeout_s)),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=configured.idle_timeout_s,
        timeout_graceful_shutdown=int(configured.drain_timeout_s) + 2,
    )


def kill(pid: int) -> None:
    """End a worker of this machine that hangs; it has no ears for a polite word.

    The worker has named the process itself: what would be a group of them, or the gateway, is left alone.
    """
    if pid > 1 and pid != os.getpid():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


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


def take_over(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """The listening sockets that a service manager keeps for us, by the rules of sd_listen_fds(3).

    They outlive this process: who connects while there is none waits for the next. Takes what tells of them
    out of `environ`. Raises `ValueError` or `OSError` for what is no listening socket.
    """
    told = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if told["LISTEN_PID"] != str(pid):  # none, or left over from a process further up
        return []
    listeners = []
    for number in range(FIRST_HANDED_OVER, FIRST_HANDED_OVER + int(told["LISTEN_FDS"])):
        os.set_inheritable(number, False)
        listener = socket.socket(fileno=number)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise ValueError(f"descriptor {number} does not listen for TCP")
        listeners.append(listener)
    return listeners


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
        listeners = take_over(os.environ, os.getpid())
    except (OSError, ValueError) as error:
        settings.exit_with("gateway", f"cannot take over sockets: {error}")
    try:
        listeners = listeners or [listen(configured.host, configured.port)]
    except OSError as error:
        settings.exit_with(
            "gateway", f"cannot listen on {configured.host}:{configured.port}: {error.strerror}"
        )
    try:
        keyring = Keyring(configured.api_keys, configured.api_keys_file)
        check_exposure(listeners, keyring, configured.insecure_no_keys)
    except (KeysError, OSError) as error:
        settings.exit_with("gateway", str(error))
    try:
        gateway = build(configured, keyring)
    except (sockets.EndpointError, zmq.ZMQError, OSError) as error:
        settings.exit_with("gateway", f"cannot meet workers at {configured.endpoint}: {error}")
    for listener in listeners:
        host, port = listener.getsockname()[:2]
        log.info("listening at http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)
    server = Server(server_config(gateway), gateway)
    # uvicorn raises the signal that stopped it once more when all is done.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(listeners)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
