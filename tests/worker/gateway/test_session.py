"""A worker's session with its gateways, at moments that real sockets do not hit at will."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from protocol.messages import PROTOCOL_VERSION, Hello, Message, Welcome
from tests.factories import request
from worker.gateway.dealer import DealerLink
from worker.gateway.session import GatewaySession

ORPHAN_S = 1.0


class Line:
    """A connection whose changes and messages a test decides. `unsent`: what the session has queued."""

    def __init__(self) -> None:
        self.connected = False
        self.changed: list[bool] = []
        self.received: list[Message] = []
        self.unsent: list[Message] = []
        self.forget = self.unsent.clear

    def changes(self) -> Iterator[bool]:
        while self.changed:
            self.connected = self.changed.pop(0)
            yield self.connected

    def receive(self) -> Iterator[tuple[Message, list[bytes]]]:
        while self.received:
            yield self.received.pop(0), []

    def send(self, *messages: Message) -> None:
        self.unsent += messages


class Running(dict[str, object]):
    """The requests that run, without a model."""

    def take(self, message: Any, media: object) -> None:
        self[message.id] = message

    def abandon(self) -> None:
        self.clear()

    def pass_on(self) -> None:
        pass


def test_a_gateway_that_comes_in_the_moment_when_the_orphans_end_is_greeted() -> None:
    line, running = Line(), Running()
    hello = Hello(incarnation="w", version=PROTOCOL_VERSION, model="m", pid=1)
    session = GatewaySession(cast(DealerLink, line), lambda rows: [hello], lambda send: cast(Any, running))
    line.changed = [True]
    session.watch(0.0)
    line.received = [
        Welcome(incarnation="g", version=PROTOCOL_VERSION, orphan_s=ORPHAN_S),
        request("a", incarnation="g"),
    ]
    assert list(session.receive()) == []
    assert list(running) == ["a"]
    line.changed = [False]
    session.watch(1.0)
    assert line.unsent == []
    line.changed = [True]
    session.watch(1.0 + ORPHAN_S)
    assert (list(running), line.unsent) == ([], [hello])


def test_each_new_gateway_is_greeted_even_if_the_one_before_it_has_not_answered() -> None:
    line, running = Line(), Running()
    hello = Hello(incarnation="w", version=PROTOCOL_VERSION, model="m", pid=1)
    session = GatewaySession(cast(DealerLink, line), lambda rows: [hello], lambda send: cast(Any, running))
    line.changed = [True]
    session.watch(0.0)
    for gateway in ("first", "second", "third"):
        line.unsent.clear()
        line.received = [
            Welcome(incarnation=gateway, version=PROTOCOL_VERSION, orphan_s=ORPHAN_S),
            request(f"of {gateway}", incarnation=gateway),
        ]
        assert list(session.receive()) == []
        assert line.unsent == ([] if gateway == "first" else [hello])
        assert f"of {gateway}" in running
    session.watch(2 * ORPHAN_S)
    assert "of third" in running
