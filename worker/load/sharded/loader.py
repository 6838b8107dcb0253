"""Load this rank's shard of a model, like `load` but in steps that all ranks take together.

`read` only requires that the ranks have been joined, and may take any time. All later steps are computed by
all ranks together.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.common.model_folder import name_of, original_name
from protocol.types import Resources
from worker.interfaces import Engine, InsufficientMemoryError, Model, ModelError, Progress
from worker.load.config import ModelConfig, find_task, in_mlx_lm
from worker.load.device import MemoryFit, prepare_device
from worker.load.explain import describe, explain, raise_if_transient
from worker.load.load import TOKENIZERS, find_model
from worker.load.options import LoadOptions
from worker.load.sharded.parallelism import ShardGroup, ShardNetwork, weight_bytes
from worker.load.source import fingerprint, lossy, weight_files
from worker.load.weights import evaluate, position_cost, warm_up
from worker.process.startup_timer import StartupTimer

if TYPE_CHECKING:
    from worker.load.text import Tokenizers
    from worker.runner.kv.capability_probe import BatchCapabilities

log = logging.getLogger(__name__)

_ROW_TOKENS = 1024
"""Length of the row whose cache size is compared between ranks."""


class ShardLoader:
    """Loader of one rank's shard. `name`: the model's name for clients."""

    def __init__(
        self,
        model: str | None,
        split: ShardGroup,
        options: LoadOptions,
        *,
        timer: StartupTimer | None = None,
        measures_verify_cost: bool = False,
    ) -> None:
        """Parameters as for `ModelLoader`. `measures_verify_cost`: measure what verifying drafts costs."""
        self.name = options.served_name or name_of(model)
        self._options = options
        self._model = model
        self._split = split
        self._memory_fit = MemoryFit.of(self.name, options)
        self._timer = timer or StartupTimer()
        self._measures_verify_cost = measures_verify_cost
        self._folder = Path()
        self._config: ModelConfig
        self._network: ShardNetwork
        self._weight_bytes = self._cache_bytes = 0

    def read(self, progress: Progress) -> None:
        """Load this rank's weights. Raises `ModelError` or `InsufficientMemoryError`."""
        self._timer.lap("start")
        self._folder, self._config = find_model(self._model, self.name)
        self._require_splittable()
        weight_files(self._folder, self.name)
        self._timer.lap("imports")
        reason = ""
        try:
            self._read(progress)
        except (ModelError, InsufficientMemoryError) as error:
            raise type(error)(self._named(str(error))) from None
        except (Exception, SystemExit) as error:  # boundary of the load, as in `load`
            raise_if_transient(error, self.name)
            reason = explain(error, self._config)
        if reason:
            raise ModelError(self._named(reason))
        self._timer.lap("weights")

    def _read(self, progress: Progress) -> None:
        self._network = self._split.open(self._folder)
        self._weight_bytes = weight_bytes(self._network)
        budget = self._memory_fit.budget(self._weight_bytes)
        prepare_device(budget)
        evaluate(self._network, progress)
        self._cache_bytes = budget.left_for_caches(self._weight_bytes)

    @cached_property
    def _tokenizers(self) -> Tokenizers:
        from worker.load.text import Tokenizers

        return Tokenizers(self._folder, self._config, TOKENIZERS, self._options.parsers)

    def _require_splittable(self) -> None:
        """Raise `ModelError` for kinds of models that are never sharded."""
        if (
            find_task(self._folder, self._config, original_name(self._model), self._options.task)
            != "generate"
        ):
            raise ModelError(self._named("embedding and reranking models run on one machine only."))
        if self._config.kind == "vision" and not self._options.text_only:
            raise ModelError(
                self._named(
                    "it is a vision model, and images are not supported on several machines. Add --text-only."
                )
            )
        if not in_mlx_lm(self._config):
            raise ModelError(
                self._named("only mlx-vlm implements it, and cannot split it. Run it on one machine.")
            )

    def _named(self, reason: str) -> str:
        return f"{self.name}: {reason.removeprefix(f'{self.name}: ')}"

    # --- together ---

    def model(self) -> Model:
        """Build the first rank's model, whose info describes all ranks. Raises `ModelError`."""
        from worker.load.text import build_text_model

        folder, capabilities = self._folder, self._abilities()
        model = build_text_model(
            self.name,
            folder,
            self._config,
            self._network,
            capabilities=capabilities,
            tokenizers=self._tokenizers,
            agree=self._split.drawn,
            kv_quantization=self._options.kv_quantization,
        )
        self._timer.lap("tokenizer")
        left, price = self._proven(model.engine, capabilities)
        facts = replace(
            model.info,
            parameters=self._split.parameters,
            plan=f"{name_of(self._model)}, {self._split.mode} over {self._split.size} processes",
            cache_bytes_max=left,
            identity=fingerprint(folder / "config.json", weight_files(folder, self.name), lossy(model.info)),
        )
        log.info("%s", describe(facts, self._config, "generate", self._weight_bytes))
        return replace(model, info=facts, position_cost=price)

    def engine(self) -> Engine:
        """Build the engine of another rank. Raises whatever upstream raises."""
        from worker.runner.runner import BatchEngine

        capabilities = self._abilities()
        kv = self._options.kv_quantization
        engine = BatchEngine(self._network, capabilities, agree=self._split.drawn, kv_quantization=kv)
        self._proven(engine, capabilities)
        return engine

    def _abilities(self) -> BatchCapabilities:
        from worker.load.capabilities import probe

        split, alike = self._split, self._split.is_alike(self._network)
        kv = self._options.kv_quantization
        try:
            found = probe(self._folder, self._network, split.open, kv, split.agreed, alike=alike)
        except ModelError as error:
            raise ModelError(self._named(str(error))) from None
        self._timer.lap("trial")
        return found

    def _proven(self, engine: Engine, capabilities: BatchCapabilities) -> tuple[int, float | None]:
        """Warm up. Return the cache bytes that fit on every rank, in terms of the first rank's caches, and
        the measured verify cost."""
        warm_up(engine, rows=2)
        price = position_cost(engine) if capabilities.ahead and self._measures_verify_cost else None
        self._memory_fit.wire(weight_files(self._folder, self.name))
        self._timer.lap("warm-up")
        return self._split.fitting(self._cache_bytes, engine.row_bytes(_ROW_TOKENS)), price

    def device_memory(self) -> Resources:
        """Return the memory of this rank's arrays. Call on the model thread."""
        from worker.load import memory

        return memory.taken()
