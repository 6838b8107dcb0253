"""Loads a model as a set, on its first rank, and leads the others from then on.

While weights are read a rank may take as long as it likes. What all compute together has a limit, and so has
every later step (`stall_timeout`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from protocol.naming import name_of
from protocol.parts import Resources
from protocol.workersettings import WorkerSettings
from worker.contract import Model, Progress
from worker.laps import Laps
from worker.ranks import calls
from worker.ranks.leader import Leader
from worker.ranks.meeting import Meeting
from worker.ranks.memory import Ledger

if TYPE_CHECKING:
    from worker.models.part import PartLoader

log = logging.getLogger(__name__)

PROOF_S_MAX = 300.0
"""What trying a model and warming it up may take, of which nothing waits for a disk."""


class SetLoader:
    """`contract.Loader` for the first rank."""

    def __init__(
        self,
        settings: WorkerSettings,
        meeting: Meeting,
        laps: Laps | None = None,
        trials: Path | None = None,
    ) -> None:
        """`trials`: as for `ModelLoader`, of its draft model."""
        self.name = settings.served_name or name_of(settings.model or None)
        self._settings = settings
        self._meeting = meeting
        self._laps = laps
        self._trials = trials
        self._ledger = Ledger(meeting.line.hear)
        self._loader: PartLoader | None = None

    def load(self, progress: Progress) -> Model:
        """See `contract.Loader`. Raises `RankAbsentError` where somebody does not come."""
        # What is imported here takes seconds, in which the gateway knows already that somebody is coming.
        from worker.models.part import part_loader
        from worker.models.partdrafts import PartDrafts
        from worker.models.split import Split

        meeting, line, settings = self._meeting, self._meeting.line, self._settings
        split = Split(meeting.backend, settings.split)
        has_drafts = settings.speculation == "auto" or bool(settings.draft_model)
        uses_heads = has_drafts and not settings.draft_model
        drafts = PartDrafts(
            self.name,
            draft_model=settings.draft_model,
            uses_heads=uses_heads,
            leads=True,
            trials=self._trials,
        )
        loader = self._loader = part_loader(settings, split, drafts, self._laps, has_drafts=has_drafts)
        watch = meeting.gather()
        line.call(calls.Join(uses_heads, has_drafts))
        split.join()
        loader.read(progress)
        meeting.await_read()
        watch.allow(PROOF_S_MAX, "trying the model")
        line.call(calls.Prove())
        model = loader.model()
        self._ledger.await_all(split.size - 1)
        watch.allow(math.inf, "")
        log.info("%d ranks run %s, split by %s over %s", split.size, self.name, split.mode, split.backend)
        return replace(model, engine=Leader(model.engine, line))

    def device_memory(self) -> Resources:
        """See `PartLoader`. Once it is loaded; and what the others take."""
        own = self._loader.device_memory() if self._loader else Resources()
        return structs.replace(own, ranks=self._ledger.read())
