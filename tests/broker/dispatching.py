"""A dispatcher without sockets: what it sends is kept, the clock is turned by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from msgspec.structs import replace

from broker.dispatch.admission import Admission
from broker.dispatch.dispatcher import Dispatcher, Timeouts
from broker.dispatch.fleet import Fleet
from broker.dispatch.flight import Flight
from broker.dispatch.routing import Method, Routing
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CacheCleared,
    Events,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Reused,
    ToGateway,
)
from protocol.orders import Orders
from protocol.parts import Capabilities, Delta, PrefixStatus, Reuse, RowStatus, Sampling, Usage
from protocol.wire import WireError

GATEWAY = "gateway"
SILENT_S, STALL_S = 3.0, 60.0
FAILOVER_S, HUNG_S = 120.0, 15.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Line:
    """The dispatcher, and the workers' side of its line in the words of a test."""

    def __init__(self, *, waiting_max: int = 8, method: Method = "affinity", host: str = "") -> None:
        self.clock = Clock()
        self.sent: list[tuple[str, Message]] = []
        self.media: dict[str, list[bytes]] = {}
        self.unreachable: set[str] = set()
        self.unsendable: set[str] = set()
        self.killed: list[tuple[str, int]] = []
        self.told: list[Orders] = []
        self.steps = 0
        self.contexts: list[AbstractContextManager[list[Flight]]] = []
        self.dispatcher = Dispatcher(
            incarnation=GATEWAY,
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
        """What was sent to a worker since the last call."""
        messages = [message for to, message in self.sent if to == peer]
        self.sent = [(to, message) for to, message in self.sent if to != peer]
        return messages

    def legs_sent_to(self, peer: str) -> list[str]:
        """The requests among them, by the ids that the worker is to call them."""
        return [message.id for message in self.sent_to(peer) if isinstance(message, Generate)]

    def hello(
        self, worker: str, model: str = "m", version: int = PROTOCOL_VERSION, host: str = "", pid: int = 1
    ) -> None:
        hello = Hello(incarnation=worker, version=version, model=model, pid=pid, host=host)
        self.dispatcher.hear(worker, hello)

    def serving(
        self,
        worker: str,
        model: str = "m",
        rows: int = 4,
        images: bool = False,
        host: str = "",
        pid: int = 1,
        store: str = "",
    ) -> None:
        """A worker comes, loaded."""
        self.hello(worker, model, host=host, pid=pid)
        said = replace(ready(worker, model, rows, images), store=store)
        self.dispatcher.hear(worker, said)

    def board(self, request: Generate, media: Sequence[bytes] = ()) -> Flight:
        """A client who stays."""
        context = self.dispatcher.board(self.dispatcher.find("m"), [request], media)
        self.contexts.append(context)
        [flight] = context.__enter__()
        return flight

    def lose_for_good(self, worker: str) -> None:
        """It dies, and no other comes for as long as anybody waits."""
        self.dispatcher.lost(worker)
        self.clock.now += FAILOVER_S + 1
        self.dispatcher.sweep()

    def beat(
        self,
        worker: str,
        running: int = 0,
        steps: int = 0,
        rows: Sequence[RowStatus] = (),
        prefix: PrefixStatus | None = None,
    ) -> None:
        message = Heartbeat(
            incarnation=worker, running=running, waiting=0, steps=steps, rows=list(rows), prefix=prefix
        )
        self.dispatcher.hear(worker, message)

    def say(
        self,
        worker: str,
        *messages: ToGateway,
    ) -> None:
        for message in messages:
            self.dispatcher.hear(worker, message)


def ready(worker: str, model: str = "m", rows: int = 4, images: bool = False) -> Ready:
    capabilities = Capabilities(images=images)
    return Ready(
        incarnation=worker,
        model=model,
        context_length=8192,
        running_max=rows,
        capabilities=capabilities,
        cache_bytes_max=2**30,
        tokens_max=4096,
    )


def request(id: str) -> Generate:
    return Generate(incarnation=GATEWAY, id=id, sampling=Sampling(seed=1), prompt="x")


def accepted(worker: str, id: str) -> Accepted:
    return Accepted(incarnation=worker, id=id, prompt_tokens=3)


def reused(worker: str, id: str, tokens: int = 0, tier: str = "none", miss: str = "cold") -> Reused:
    return Reused(incarnation=worker, id=id, reuse=Reuse(tokens=tokens, tier=tier, miss=miss))


def cleared(worker: str, id: str, ram_bytes: int = 0, disk_bytes: int = 0) -> CacheCleared:
    return CacheCleared(incarnation=worker, id=id, ram_bytes=ram_bytes, disk_bytes=disk_bytes)


def events(worker: str, id: str, *texts: str, first: int = 0) -> Events:
    """One token for each text, in one message."""
    deltas = [Delta(id=id, sequence=first + n, tokens=[n], text=text) for n, text in enumerate(texts)]
    return Events(incarnation=worker, deltas=deltas)


def finished(worker: str, id: str, tokens: int = 0, cached: int = 0) -> Finished:
    usage = Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=cached)
    return Finished(incarnation=worker, id=id, reason="stop", usage=usage)


def failed(worker: str, id: str, code: str = "engine_error") -> Failed:
    return Failed(incarnation=worker, id=id, code=code, message="")
