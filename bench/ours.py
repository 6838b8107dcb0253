"""Our side in process: the worker's real loop, scheduler, engine and output processors, no socket."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.sides import Ask
from protocol.messages import Failed, Message, StepOutputs
from protocol.settings.worker import WorkerSettings
from worker.core.commands import Abort, Command, Stop, Submit
from worker.core.engine_core import EngineCore
from worker.core.publisher import Publisher
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.speculation import Speculation
from worker.interfaces import Model
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.values import EngineRequest

BYTES_MAX = 2**40
"""More bytes than any case uses: memory is accounted for, as in a worker, but never runs out."""


def load(folder: Path, draft: Path | None = None) -> Model:
    """Load and warm up the model in `folder`, and its draft model, as a worker does."""
    loader = ModelLoader(
        str(folder), LoadOptions(draft_model=str(draft) if draft else None, speculation="auto")
    )
    model = loader.load(lambda done, total: None)
    assert isinstance(model, Model)
    return model


class Ours:
    """`bench.sides.Side`. `_publish` counts the tokens of the loop and stops it at the goal."""

    def __init__(self, model: Model, rows_max: int, *, drafting: bool = True) -> None:
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop = EngineCore(
            model=model,
            scheduler=Scheduler(
                SchedulerConfig(rows_max=rows_max, bytes_max=BYTES_MAX, row_bytes=model.engine.row_bytes)
            ),
            inbox=self._inbox,
            publisher=Publisher("bench", self._publish, lambda: 0),
            drafting=Speculation(
                is_on=drafting,
                drafter=model.engine.drafter,
                target_s=WorkerSettings().inter_token_target_s,
                position_cost=model.position_cost,
            ),
        )
        self._submitted = 0
        self._tokens = 0
        self._goal = 0
        self._failure: Failed | None = None

    @property
    def steps(self) -> int:
        """Steps of the loop so far."""
        return self._loop.counters.steps

    @property
    def drafted(self) -> tuple[int, int]:
        """Draft tokens so far: accepted and rejected."""
        return self._loop.drafting.accepted, self._loop.drafting.rejected

    def submit(self, asks: Sequence[Ask]) -> None:
        first = self._submitted
        self._submitted += len(asks)
        self.submit_prepared(
            EngineRequest(
                id=str(first + number),
                tokens=tuple(ask.tokens),
                sampling=ask.sampling,
                stop=(),
                max_tokens=ask.max_tokens,
                end_tokens=frozenset(),
            )
            for number, ask in enumerate(asks)
        )

    def submit_prepared(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests as a worker's I/O thread does."""
        for request in requests:
            self._inbox.put(Submit(request))

    def run(self, tokens: int) -> int:
        self._tokens, self._goal = 0, tokens
        self._loop.run()
        if self._failure is not None:
            raise RuntimeError(f"{self._failure.code}: {self._failure.message}")
        return self._tokens

    def close(self) -> None:
        for row in self._loop.scheduler:
            self._inbox.put(Abort(row.id))
        self._inbox.put(Stop())
        self._loop.run()

    def _publish(self, message: Message) -> None:
        match message:
            case StepOutputs():
                before = self._tokens
                self._tokens += sum(len(delta.tokens) for delta in message.deltas)
                if before < self._goal <= self._tokens:
                    self._inbox.put(Stop())
            case Failed():
                self._failure = message
                self._inbox.put(Stop())
