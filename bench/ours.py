"""Our side in process: the worker's real loop, scheduler, engine and output pipelines, without its socket."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.sides import Ask
from protocol.messages import Events, Failed, Finished, Message
from protocol.workersettings import WorkerSettings
from worker.contract import Model, Prepared
from worker.models.load import ModelLoader
from worker.schedule.commands import Command, Drop, Stop, Submit
from worker.schedule.drafting import Drafting
from worker.schedule.following import Following
from worker.schedule.loop import Loop
from worker.schedule.publisher import Publisher
from worker.schedule.scheduler import Policy, Scheduler

BYTES_MAX = 2**40
"""More than any case takes: bytes are accounted for, as in a worker, and never run out."""


def load(folder: Path, draft: Path | None = None) -> Model:
    """The model in `folder` as a worker loads and warms it, and its draft model."""
    loader = ModelLoader(str(folder), draft_model=str(draft) if draft else None, uses_heads=True)
    return loader.load(lambda done, total: None)


def _following(model: Model) -> Following | None:
    drafter = model.engine.drafter
    return Following(drafter, WorkerSettings().inter_token_target_s) if drafter else None


class Ours:
    """`bench.sides.Side`. `publish` counts what the loop says, and stops it when it has said enough."""

    def __init__(self, model: Model, rows_max: int, *, drafting: bool = True) -> None:
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop = Loop(
            model=model,
            scheduler=Scheduler(
                Policy(rows_max=rows_max, bytes_max=BYTES_MAX, row_bytes=model.engine.row_bytes)
            ),
            inbox=self._inbox,
            publisher=Publisher("bench", self._publish, lambda: 0),
            drafting=Drafting(is_on=drafting, following=_following(model), column_price=model.column_price),
        )
        self._behind: deque[Prepared] = deque()
        self._submitted = 0
        self._tokens = 0
        self._goal = 0
        self._failure: Failed | None = None

    @property
    def steps(self) -> int:
        """Of the loop, so far."""
        return self._loop.counters.steps

    @property
    def drafted(self) -> tuple[int, int]:
        """Drafted tokens so far: right, and wrong."""
        return self._loop.drafting.accepted, self._loop.drafting.rejected

    def submit(self, asks: Sequence[Ask]) -> None:
        """See `Side`."""
        first = self._submitted
        self._submitted += len(asks)
        self.submit_prepared(
            Prepared(
                id=str(first + number),
                tokens=tuple(ask.tokens),
                draw=ask.draw,
                stop=(),
                max_tokens=ask.max_tokens,
                end_tokens=frozenset(),
            )
            for number, ask in enumerate(asks)
        )

    def submit_prepared(self, requests: Iterable[Prepared], at_once: int | None = None) -> None:
        """Queue requests as a worker's I/O thread does; beyond so many `at_once` each when another has ended,
        as from so many clients."""
        self._behind.extend(requests)
        for _ in range(len(self._behind) if at_once is None else at_once):
            self._submit_next()

    def _submit_next(self) -> None:
        if self._behind:
            self._inbox.put(Submit(self._behind.popleft()))

    def run(self, tokens: int) -> int:
        """See `Side`."""
        self._tokens, self._goal = 0, tokens
        self._loop.run()
        if self._failure is not None:
            raise RuntimeError(f"{self._failure.code}: {self._failure.message}")
        return self._tokens

    def close(self) -> None:
        """See `Side`."""
        self._inbox.put(Drop(None))
        self._inbox.put(Stop())
        self._loop.run()

    def _publish(self, message: Message) -> None:
        match message:
            case Events():
                before = self._tokens
                self._tokens += sum(len(delta.tokens) for delta in message.deltas)
                if before < self._goal <= self._tokens:
                    self._inbox.put(Stop())
            case Finished():
                self._submit_next()
            case Failed():
                self._failure = message
                self._inbox.put(Stop())
