"""Loads a model as a set, on its first rank, and leads the others from then on.

While weights are read a rank may take as long as it likes. What all compute together has a limit, and so has
every later step (`stall_timeout`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from protocol.parts import Resources
from worker.contract import Model, Progress
from worker.models.part import PartLoader
from worker.models.split import Split
from worker.ranks import calls
from worker.ranks.leader import Leader
from worker.ranks.meeting import Meeting

log = logging.getLogger(__name__)

PROOF_S_MAX = 300.0
"""What trying a model and warming it up may take, of which nothing waits for a disk."""


class SetLoader:
    """`contract.Loader` for the first rank."""

    def __init__(self, loader: PartLoader, split: Split, meeting: Meeting) -> None:
        self.name = loader.name
        self._loader = loader
        self._split = split
        self._meeting = meeting

    def load(self, progress: Progress) -> Model:
        """See `contract.Loader`. Raises `RankAbsentError` where somebody does not come."""
        split, meeting, line = self._split, self._meeting, self._meeting.line
        watch = meeting.gather()
        line.call(calls.Join())
        split.join()
        self._loader.read(progress)
        meeting.await_read()
        watch.allow(PROOF_S_MAX, "trying the model")
        line.call(calls.Prove())
        model = self._loader.model()
        watch.allow(math.inf, "")
        log.info("%d ranks run %s, split by %s over %s", split.size, self.name, split.mode, split.backend)
        return replace(model, engine=Leader(model.engine, line))

    def device_memory(self) -> Resources:
        """See `PartLoader`."""
        return self._loader.device_memory()
