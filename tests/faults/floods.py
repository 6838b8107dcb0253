"""A peer that floods its gateway: `python -m tests.faults.floods ENDPOINT MODEL KIND [--at-once]`.

It announces itself as a ready worker. After its first request, or at once, it repeats one message as fast as
it can and ignores all replies.
"""

from __future__ import annotations

import sys

import zmq

from protocol import sockets, wire
from protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Ready,
    StepOutputs,
    new_incarnation,
)
from protocol.types import Delta


def flood_of(kind: str, name: str) -> list[bytes]:
    """Return the frames of the repeated message."""
    match kind:
        case "heartbeats":
            return wire.encode(Heartbeat(incarnation=name, running=0, waiting=0, steps=1))
        case "megabytes of deltas":
            deltas = [Delta(id="nobody's", sequence=number, tokens=[7]) for number in range(150_000)]
            return wire.encode(StepOutputs(incarnation=name, deltas=deltas))
        case "megabytes of garbage":
            return [b"\xc1" * 2**20]
    raise ValueError(kind)


def main(endpoint: str, model: str, kind: str, *options: str) -> None:
    name = new_incarnation()
    line = sockets.connect_dealer(zmq.Context(), endpoint, name, None)

    def send(message: Message) -> None:
        line.send_multipart(wire.encode(message))

    send(Hello(incarnation=name, version=PROTOCOL_VERSION, model=model, pid=1))
    send(Ready(incarnation=name, model=model, context_length=8192, running_max=8))
    while "--at-once" not in options:
        message, _ = wire.decode_to_worker(line.recv_multipart())
        if isinstance(message, Generate):
            send(Accepted(incarnation=name, id=message.id, prompt_tokens=1))
            break
    flood = flood_of(kind, name)
    while True:
        line.send_multipart(flood)


if __name__ == "__main__":
    main(*sys.argv[1:])
