"""Handover: a gateway is replaced by another one while both run, and no client notices.

The old gateway gives up what only one can have: the endpoint of the workers, the journal, the batches, the
listening socket. It keeps the requests that its clients wait for, and its sessions with the workers; each
client's connection goes to the new gateway as soon as it is between two requests. When none is left, the old
one ends. Answers that nobody reads at the moment (background responses, lines of batches, retries that are
due) are continued by the new one, from the journal.

The old one accepts clients until it has given everything up. Those that connect before the new one accepts
wait in the backlog of the listening socket, which belongs to the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any

from broker.answers.recorder import StoreRecorder
from broker.batches.store import StorageError
from broker.http.server import Server
from broker.journal.file import Operation
from broker.routes.recovery import apply_inherited
from broker.routes.state import GatewayState
from broker.transport.handover import (
    ClientConnection,
    Given,
    HandoverLine,
    HandoverListener,
    HandoverMessage,
    JournalOperation,
    Predecessor,
    Serving,
    TakeOver,
)
from broker.transport.router import RouterLink
from protocol import sockets
from protocol.messages import PROTOCOL_VERSION

log = logging.getLogger(__name__)

CONFIRM_S_MAX = 15.0
"""Time in seconds for a successor to serve; if it ends before, the old gateway ends too, and a new one is
started."""
WORKERS_S_MAX = 10.0
"""Time in seconds that a new gateway waits for the workers of the old one before it serves clients."""
_POLL_S = 0.02


class _ForwardingQueue:
    """Takes operations for the journal of the successor."""

    def __init__(self, line: HandoverLine) -> None:
        self._line = line

    def add(self, operation: Operation, nbytes: int = 0) -> int:
        self.forward(operation)
        return 0

    def forward(self, operation: Operation) -> None:
        self._line.send(JournalOperation.of(operation))


class Departure:
    """The end of a gateway that is replaced by another one."""

    def __init__(self, gateway: GatewayState, link: RouterLink, server: Server) -> None:
        self._gateway, self._link, self._server = gateway, link, server
        self._listener: HandoverListener | None = None
        self._task: asyncio.Task[None] | None = None
        self._handed_over_at: float | None = None
        self._is_begun = self._is_confirmed = False

    def listen(self) -> None:
        """Wait for a successor from now on."""
        try:
            path = sockets.handover_path(self._gateway.settings.port)
            self._listener = HandoverListener(path, self._on_successor)
        except (sockets.EndpointError, OSError) as error:
            log.warning("`roundhouse reload --gateway` will not work: %s", error)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _on_successor(self, line: HandoverLine) -> None:
        line.start(partial(self._on_message, line), self._on_end)

    def _on_message(self, line: HandoverLine, message: HandoverMessage, _: socket.socket | None) -> None:
        match message:
            case TakeOver():
                self._task = asyncio.create_task(self._answer(line, message))
            case Serving():
                self._is_confirmed = True
            case _:
                line.close()

    async def _answer(self, line: HandoverLine, asked: TakeOver) -> None:
        if refusal := self._objection(asked):
            line.send(Given(refusal=refusal))
            return
        try:
            await self._hand_over(line)
        except OSError as error:
            log.error("the handover to another gateway failed: %s", error)
            line.send(Given(refusal=f"it failed: {error}"))

    def _objection(self, asked: TakeOver) -> str:
        """Return why this gateway does not hand over; empty: it does."""
        dispatcher = self._gateway.dispatcher
        if dispatcher.stopping or dispatcher.handed_over or self._is_begun:
            return "it ends already"
        if asked.version != PROTOCOL_VERSION:
            versions = f"{PROTOCOL_VERSION}, not {asked.version}"
            return f"its workers speak another version of the protocol ({versions}): restart the server"
        if not self._link.can_move:
            return "workers connect to it over TCP (--endpoint or --join), which cannot be handed over"
        return ""

    async def _hand_over(self, line: HandoverLine) -> None:
        gateway, dispatcher = self._gateway, self._gateway.dispatcher
        endpoint, self._is_begun = self._link.move(), True
        if gateway.batches is not None:
            with suppress(StorageError):  # those lines run again
                await gateway.batches.close()
        stay = gateway.answers.hand_over()
        queue = _ForwardingQueue(line)
        if gateway.journal is not None:
            gateway.journal.hand_over(queue.forward)
            await asyncio.to_thread(gateway.journal.close)
        else:
            self._forward_responses(queue)
        workers = dispatcher.hand_over()
        self._handed_over_at = time.monotonic()
        self.close()
        line.send(Given(kept=stay, endpoint=endpoint, workers=workers))
        log.info("another gateway takes over; %d requests are finished here", len(dispatcher.flights))
        self._server.hand_over(partial(line.send, ClientConnection()))

    def _forward_responses(self, queue: _ForwardingQueue) -> None:
        """Give the successor the stored responses, which no journal has."""
        self._gateway.responses.log = recorder = StoreRecorder(queue)
        for owner, id, stored in self._gateway.responses:
            recorder.put(owner, id, stored)

    def _on_end(self) -> None:
        at = self._handed_over_at
        if at is None or self._is_confirmed or time.monotonic() - at > CONFIRM_S_MAX:
            return
        log.error("the successor has ended before it served: this gateway ends too, so that one is started")
        self._server.should_exit = True


class Arrival:
    """The begin of a gateway that replaces another one."""

    def __init__(self, predecessor: Predecessor) -> None:
        self._predecessor = predecessor
        self._adopting: set[asyncio.Task[Any]] = set()

    @property
    def stay(self) -> frozenset[str]:
        """Ids of the journal's answers that the old gateway still serves."""
        return frozenset(self._predecessor.given.kept)

    async def begin(self, gateway: GatewayState) -> None:
        """Take over what came before, and wait for the workers of the old gateway."""
        dispatcher, given = gateway.dispatcher, self._predecessor.given
        dispatcher.predecessor = given.endpoint
        for message in self._predecessor.early:
            if isinstance(message, JournalOperation):
                apply_inherited(gateway, message.operation())
        until = time.monotonic() + WORKERS_S_MAX
        while time.monotonic() < until:
            there = {worker.incarnation for worker in dispatcher.fleet if worker.serves}
            if there.issuperset(given.workers):
                return
            await asyncio.sleep(_POLL_S)
        log.warning("not all workers of the earlier gateway have connected to this one yet")

    def serve(self, gateway: GatewayState, server: Server) -> None:
        """Take over what the old gateway reports, until it ends."""
        line = self._predecessor.open()
        line.start(partial(self._on_message, gateway, server), partial(self._on_end, gateway))
        line.send(Serving())

    def _on_message(
        self, gateway: GatewayState, server: Server, message: HandoverMessage, client: socket.socket | None
    ) -> None:
        match message:
            case ClientConnection() if client is not None:
                client.setblocking(False)
                task = asyncio.create_task(self._adopt(server, client))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)
            case JournalOperation():
                apply_inherited(gateway, message.operation())
            case _:
                log.warning("unexpected %s from the earlier gateway", type(message).__name__)

    async def _adopt(self, server: Server, client: socket.socket) -> None:
        try:
            await server.adopt(client)
        except OSError:  # the client has left meanwhile
            client.close()

    def _on_end(self, gateway: GatewayState) -> None:
        log.info("the earlier gateway has ended")
        gateway.dispatcher.predecessor = ""
        gateway.inherited.end()
