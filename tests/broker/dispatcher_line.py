"""Dispatcher without sockets: sent messages are recorded, and the clock is manual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from msgspec.structs import replace

from broker.dispatch.admission import Admission
from broker.dispatch.dispatcher import Dispatcher, Timeouts
from broker.dispatch.fleet import Fleet
from broker.dispatch.flight import Flight
from broker.dispatch.routing import Routing
from protocol.errors import RequestError
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Failed,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Ready,
    ToGateway,
)
from protocol.supervisor_messages import DesiredModels
from protocol.types import Capabilities, Delta, PrefixStatus, RequestStatus, RoutingMethod
from protocol.wire import WireError
from tests.factories import GATEWAY

SILENT_S, STALL_S = 3.0, 60.0
FAILOVER_S, HUNG_S = 120.0, 15.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Line:
    """Dispatcher, with methods that play its workers."""

    def __init__(
        self,
        *,
        waiting_max: int = 8,
        method: RoutingMethod = "affinity",
        host: str = "",
        incarnation: str = GATEWAY,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.sent: list[tuple[str, Message]] = []
        self.media: dict[str, list[bytes]] = {}
        self.unreachable: set[str] = set()
        self.unsendable: set[str] = set()
        self.killed: list[tuple[str, int]] = []
        self.told: list[DesiredModels] = []
        self.steps = 0
        self.contexts: list[AbstractContextManager[list[Flight]]] = []
        self.dispatcher = Dispatcher(
            incarnation=incarnation,
            fleet=Fleet(silent_after_s=SILENT_S, stall_timeout_s=STALL_S),
            admission=Admission(clock=self.clock, waiting_max=waiting_max),
            send=self.send,
            clock=self.clock,
            timeouts=Timeouts(failover_s=FAILOVER_S, hung_s=HUNG_S),
            end=self.end,
            tell=self.told.append,
            routing=Routing(self.clock, method),
            host=host,
        )

    def send(self, peer: str, message: Message, media: Sequence[bytes]) -> bool:
        if isinstance(message, Generate) and message.id in self.unsendable:
            raise WireError("cannot encode: Integer value out of range")
        if isinstance(message, Generate):
            self.media[message.id] = list(media)
        self.sent.append((peer, message))
        return peer not in self.unreachable

    def end(self, peer: str, pid: int) -> str:
        self.killed.append((peer, pid))
        return "killed"

    def sent_to(self, peer: str) -> list[Message]:
        """Return the messages sent to a worker since the last call."""
        messages = [message for to, message in self.sent if to == peer]
        self.sent = [(to, message) for to, message in self.sent if to != peer]
        return messages

    def generates(self, peer: str) -> list[Generate]:
        """Return the requests sent to a worker since the last call."""
        return [message for message in self.sent_to(peer) if isinstance(message, Generate)]

    def attempts_sent_to(self, peer: str) -> list[str]:
        """Return the ids of the attempts sent to a worker since the last call."""
        return [message.id for message in self.generates(peer)]

    def refusal(self, model: str | None = "m") -> RequestError:
        """Return the error of a request for a model that nobody serves."""
        return refusal(self.dispatcher.find, model)

    def hello(
        self, worker: str, model: str = "m", version: int = PROTOCOL_VERSION, host: str = "", pid: int = 1
    ) -> None:
        hello = Hello(incarnation=worker, version=version, model=model, pid=pid, host=host)
        self.dispatcher.on_message(worker, hello)

    def serving(
        self,
        worker: str,
        model: str = "m",
        rows: int = 4,
        images: bool = False,
        host: str = "",
        pid: int = 1,
        **said: Any,
    ) -> None:
        """Connect a worker whose model is loaded. `said`: other fields of its Ready."""
        self.hello(worker, model, host=host, pid=pid)
        self.dispatcher.on_message(worker, replace(ready(worker, model, rows, images), **said))

    def submit(self, request: Generate, media: Sequence[bytes] = (), model: str | None = "m") -> Flight:
        """Dispatch a request whose client stays connected."""
        context = self.dispatcher.submit(self.dispatcher.find(model), [request], media)
        self.contexts.append(context)
        [flight] = context.__enter__()
        return flight

    def lose_for_good(self, worker: str) -> None:
        """Lose the worker, and let the failover timeout pass without a successor."""
        self.dispatcher.lost(worker)
        self.clock.now += FAILOVER_S + 1
        self.dispatcher.sweep()

    def beat(
        self,
        worker: str,
        running: int = 0,
        steps: int = 0,
        rows: Sequence[RequestStatus] = (),
        prefix: PrefixStatus | None = None,
        waiting: int = 0,
    ) -> None:
        message = Heartbeat(
            incarnation=worker, running=running, waiting=waiting, steps=steps, rows=list(rows), prefix=prefix
        )
        self.dispatcher.on_message(worker, message)

    def say(self, worker: str, *messages: ToGateway) -> None:
        for message in messages:
            self.dispatcher.on_message(worker, message)


def refusal(call: Callable[..., object], *given: object) -> RequestError:
    """Return the error that the call raises."""
    with pytest.raises(RequestError) as caught:
        call(*given)
    return caught.value


def ready(worker: str, model: str = "m", rows: int = 4, images: bool = False) -> Ready:
    return Ready(
        incarnation=worker, model=model, context_length=8192, running_max=rows,
        capabilities=Capabilities(images=images), cache_bytes_max=2**30, tokens_max=4096,
    )  # fmt: skip


def cancel(id: str) -> Cancel:
    return Cancel(incarnation=GATEWAY, id=id)


def text_of(flight: Flight) -> str:
    """Return the text that its client gets next."""
    return "".join(item.text for item in flight.take() if isinstance(item, Delta))


def code_of(flight: Flight) -> str | None:
    """Return the code of its failure."""
    return flight.terminal.code if isinstance(flight.terminal, Failed) else None
