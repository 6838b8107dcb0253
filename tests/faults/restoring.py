"""`python -m tests.faults.restoring …`: the gateway with the simplest journal, a file that is written anew.

It has the checkpoint of every request, and the text so far. The next gateway restores the requests from it,
without clients. The file is written after a message of a worker, but not more often than every `LAG_S`: a
killed gateway has always answered more than its journal knows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from broker import __main__ as gateway
from broker.dispatch.checkpoint import Checkpoint
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.flight import Flight, Item
from protocol.messages import Failed, Finished
from protocol.types import Delta
from tests.system import Process, System

JOURNAL = "TESTS_JOURNAL"
LAG_S = 0.05


class Answer(Struct):
    """An answer in the journal. `end`: its finish reason or error code; empty: it runs."""

    checkpoint: Checkpoint | None = None
    at: float = 0.0
    text: str = ""
    end: str = ""

    def add(self, item: Item) -> None:
        match item:
            case Delta():
                self.text += item.text
            case Finished():
                self.end = item.reason
            case Failed():
                self.end = item.code


def read(path: Path) -> dict[str, Answer]:
    """Return the answers by request."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, Answer])
    return {}


class Journal:
    """The journal of one gateway."""

    def __init__(self, path: Path, dispatcher: Dispatcher) -> None:
        self._path, self._dispatcher = path, dispatcher
        self._answers = read(path)
        self._contexts = contextlib.ExitStack()
        self._written_at = 0.0
        for answer in self._answers.values():
            if not answer.end and answer.checkpoint is not None:
                restored = dispatcher.restore([answer.checkpoint], (), max(0.0, time.time() - answer.at))
                [flight] = self._contexts.enter_context(restored)
                flight.on_item = flight.pending.clear

    def add(self, flight: Flight, item: Item) -> None:
        self._answers.setdefault(flight.id, Answer()).add(item)

    def write(self) -> None:
        if time.monotonic() - self._written_at < LAG_S:
            return
        self._written_at = time.monotonic()
        for flight in self._dispatcher.flights:
            answer = self._answers.setdefault(flight.id, Answer())
            if not answer.end:
                answer.checkpoint, answer.at = self._dispatcher.checkpoint(flight), time.time()
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.msgpack.encode(self._answers))
        fresh.replace(self._path)


class RestoringSystem(System):
    """A system whose gateway restores the requests of the one before it."""

    @property
    def journal(self) -> Path:
        return self.folder / "restored"

    def _new_gateway(self) -> Process:
        flags = ["--port", str(self.port), "--endpoint", self.endpoint, *self._flags]
        gateway = Process(
            "gateway", ["tests.faults.restoring", *flags], self.folder, {JOURNAL: str(self.journal)}
        )
        self.wait_for("/health")
        return gateway

    def failovers(self) -> dict[str, int]:
        """Return the gateway's counts of failover events."""
        counts: dict[str, int] = self.http.get("/v1/status").json()["gateway"]["failover"]
        return counts


def main() -> int:
    build, push, on_message = gateway.build, Flight._push, Dispatcher.on_message
    journals: list[Journal] = []

    def build_with_journal(*arguments: Any) -> Any:
        state, app = build(*arguments)
        journals.append(Journal(Path(os.environ[JOURNAL]), state.dispatcher))
        return state, app

    def push_and_add(flight: Flight, item: Item) -> None:
        if journals:
            journals[0].add(flight, item)
        push(flight, item)

    def on_message_and_write(dispatcher: Dispatcher, *arguments: Any) -> int:
        useful = on_message(dispatcher, *arguments)
        journals[0].write()
        return useful

    gateway.build = build_with_journal  # type: ignore[assignment]
    Flight._push = push_and_add  # type: ignore[assignment, method-assign]
    Dispatcher.on_message = on_message_and_write  # type: ignore[assignment, method-assign]
    return gateway.main()


if __name__ == "__main__":
    sys.exit(main())
