"""Loads this rank's part of a model: as `load` does all of one, but in steps that all ranks take together.

`read` has no need of the others but to have been joined, and may take as long as it likes. What follows is
computed by all ranks at once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.naming import name_of
from protocol.parts import Resources
from protocol.tasks import Task
from protocol.workersettings import WorkerSettings
from worker.contract import Engine, Model, ModelError, NoRoomError, Progress
from worker.laps import Laps
from worker.models.config import ModelConfig, read_config, reads, require_known
from worker.models.device import prepare_device
from worker.models.explain import describe, explain
from worker.models.fingerprint import fingerprint
from worker.models.load import TOKENIZERS, evaluate, warm_up
from worker.models.pricing import column_price
from worker.models.room import Room
from worker.models.source import find_folder, weight_files
from worker.models.split import PartNetwork, Split, weight_bytes
from worker.models.tasks import find_task

if TYPE_CHECKING:
    from worker.drafts import Drafter
    from worker.engine.caches.trial import Abilities
    from worker.models.partdrafts import PartDrafts
    from worker.models.tokenizers import Tokenizers

log = logging.getLogger(__name__)

_ROW_TOKENS = 1024
"""Of the row whose cost on each rank is compared."""


class PartLoader:
    """One rank's. `name` is the model's towards clients."""

    def __init__(
        self,
        model: str | None,
        split: Split,
        *,
        served_name: str | None = None,
        room: Room | None = None,
        task: Task | None = None,
        text_only: bool = False,
        drafts: PartDrafts | None = None,
        laps: Laps | None = None,
        has_drafts: bool = False,
    ) -> None:
        """As for `ModelLoader`. `room`: None: what the machine has. `drafts`: None: nobody guesses.
        `has_drafts`: it is measured what drafts cost."""
        self.name = served_name or name_of(model)
        self._model = model
        self._split = split
        self._room = room or Room(self.name)
        self._task = task
        self._text_only = text_only
        self._drafts = drafts
        self._laps = laps or Laps()
        self._has_drafts = has_drafts
        self._folder = Path()
        self._config: ModelConfig
        self._network: PartNetwork
        self._weight_bytes = self._cache_bytes = 0

    def read(self, progress: Progress) -> None:
        """Have this rank's weights in memory. Raises `ModelError` or `NoRoomError`."""
        self._laps.lap("start")
        folder = find_folder(self._model, self._inspect)
        self._folder, self._config = folder, self._inspect(folder)
        self._require_splittable()
        weight_files(folder, self.name)
        if self._drafts is not None:
            self._drafts.find()
        self._laps.lap("imports")
        reason = ""
        try:
            self._read(progress)
        except (ModelError, NoRoomError) as error:
            raise type(error)(self._named(str(error))) from None
        except (Exception, SystemExit) as error:  # the load's boundary, as in `load`
            log.debug("%s: load failed", self.name, exc_info=True)
            reason = explain(error, self._config)
        if reason:
            raise ModelError(self._named(reason))
        self._laps.lap("weights")

    def _read(self, progress: Progress) -> None:
        drafts, split = self._drafts, self._split
        self._network = split.open(self._folder, partial(drafts.look, self._folder) if drafts else None)
        part_bytes = weight_bytes(self._network)
        self._weight_bytes = part_bytes + (drafts.weight_bytes(self._network) if drafts else 0)
        budget = self._room.budget(self._weight_bytes)
        prepare_device(budget)
        evaluate(self._network, progress)
        self._cache_bytes = budget.left_for_caches(self._weight_bytes)
        if drafts is not None and drafts.has_model:
            drafts.load(self._folder, part_bytes, split, self._tokenizers)

    @cached_property
    def _tokenizers(self) -> Tokenizers:
        from worker.models.tokenizers import Tokenizers

        return Tokenizers(self._folder, self._config, TOKENIZERS)

    def _inspect(self, folder: Path) -> ModelConfig:
        config = read_config(folder, self.name)
        require_known(config, self.name)
        return config

    def _require_splittable(self) -> None:
        """Raises `ModelError` for what several ranks are not made for, whatever the family."""
        if find_task(self._folder, self._config, name_of(self._model), self._task) != "generate":
            raise ModelError(self._named("a model that answers with numbers runs on one machine alone."))
        if self._config.kind == "vision" and not self._text_only:
            raise ModelError(
                self._named("it sees, and images are not served by several machines. Add --text-only.")
            )
        if not reads(self._config):
            raise ModelError(
                self._named("only mlx-vlm knows it, and cannot split it. Run it on one machine.")
            )

    def _named(self, reason: str) -> str:
        return f"{self.name}: {reason.removeprefix(f'{self.name}: ')}"

    # --- together ---

    def model(self) -> Model:
        """The first rank's: what it says of itself holds for all. Raises `ModelError`."""
        from worker.models.text import build_text_model

        folder, abilities = self._folder, self._abilities()
        if self._drafts is not None and self._drafts.has_model and not abilities.ahead:
            reasons = "; ".join(abilities.reasons)
            raise ModelError(
                self._named(f"no drafts can be tried on it ({reasons}): leave --draft-model out.")
            )
        model = build_text_model(
            self.name,
            folder,
            self._config,
            self._network,
            drafter=self._drafter(abilities),
            abilities=abilities,
            tokenizers=self._tokenizers,
            agree=self._split.drawn,
        )
        self._laps.lap("tokenizer")
        left, price = self._proven(model.engine, abilities)
        facts = replace(
            model.facts,
            parameters=self._split.parameters,
            plan=f"{name_of(self._model)}, {self._split.mode} over {self._split.size} processes",
            cache_bytes_max=left,
            identity=fingerprint(folder / "config.json", weight_files(folder, self.name), {}),
        )
        log.info("%s", describe(facts, self._config, "generate", self._weight_bytes))
        return replace(model, facts=facts, column_price=price)

    def engine(self) -> Engine:
        """Another rank's. Raises whatever upstream does."""
        from worker.engine.engine import BatchEngine

        abilities = self._abilities()
        self._drafter(abilities)
        engine = BatchEngine(self._network, abilities, agree=self._split.drawn)
        self._proven(engine, abilities)
        return engine

    def _abilities(self) -> Abilities:
        from worker.engine.caches.trial import find_abilities
        from worker.models.rehearsal import stage_for

        stage = stage_for(self._folder, self._network, self._split.open)
        alike = self._split.is_alike(self._network)
        found = find_abilities(stage, self._split.agreed, alike=alike)
        self._laps.lap("trial")
        return found

    def _drafter(self, abilities: Abilities) -> Drafter | None:
        if self._drafts is None:
            return None
        return self._drafts.drafter(self._split, self._network, ahead=abilities.ahead)

    def _proven(self, engine: Engine, abilities: Abilities) -> tuple[int, float | None]:
        """Warm; the bytes that are left for caches on every rank, as the first one counts them, and what a
        column costs."""
        warm_up(engine, rows=2)
        price = column_price(engine) if abilities.ahead and self._has_drafts else None
        self._laps.lap("warm-up")
        return self._split.fitting(self._cache_bytes, engine.row_bytes(_ROW_TOKENS)), price

    def device_memory(self) -> Resources:
        """What this rank's arrays take. On the model thread."""
        from worker.models import memory

        return memory.taken()


def part_loader(
    settings: WorkerSettings,
    split: Split,
    drafts: PartDrafts | None,
    laps: Laps | None = None,
    *,
    has_drafts: bool = False,
) -> PartLoader:
    """As a worker's settings have it, and the first rank has said of drafts."""
    model = settings.model or None
    name = settings.served_name or name_of(model)
    limits = settings.memory_headroom, settings.memory_limit_bytes, settings.memory_budget
    return PartLoader(
        model,
        split,
        served_name=settings.served_name,
        room=Room(name, *limits),
        task=settings.task,
        text_only=settings.text_only,
        drafts=drafts,
        laps=laps,
        has_drafts=has_drafts,
    )
