"""Loads the one model of this process: what it is, whether it fits, its weights, and a run to warm it.

All of it on the model thread. A load that fails leaves no weights behind: its error is raised from outside
the handler, because a traceback keeps every local of the frames it passed.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.naming import name_of
from protocol.parts import Resources
from protocol.tasks import Task
from worker.contract import (
    Draw,
    EncodingModel,
    Engine,
    Facts,
    Model,
    ModelError,
    Progress,
)
from worker.drafts import Drafter
from worker.laps import Laps
from worker.models.config import ModelConfig, read_config, reads, require_known
from worker.models.device import prepare_device
from worker.models.drafting import DraftModel, find_draft, load_draft
from worker.models.explain import describe, explain, explain_blindness
from worker.models.fingerprint import fingerprint
from worker.models.pricing import column_price
from worker.models.room import Room
from worker.models.source import bytes_of, find_folder, weight_files
from worker.models.tasks import find_task

if TYPE_CHECKING:
    from worker.engine.sight import VisionNetwork
    from worker.models.eyes import Eyes
    from worker.models.rehearsal import Open
    from worker.models.tokenizers import Tokenizers

log = logging.getLogger(__name__)

GROUP_BYTES = 64 * 2**20
"""Weights evaluated, and reported, at a time."""
TOKENIZERS = 3
"""One for each thread of the pool that prepares requests, and one to look into."""
_WARM_PROMPT = (1, 2, 3, 4, 5)
_WARM_STEPS = 3
_UNCUT = "its answers depend on where a prompt is cut into parts, which upstream does at other places."
"""Of mlx-vlm's alone: those that mlx-lm has too are served, and the log says so."""


class ModelLoader:
    """`contract.Loader` for a folder, a Hugging Face id, or the embedded model."""

    def __init__(
        self,
        model: str | None,
        *,
        served_name: str | None = None,
        memory_headroom: float = 0.1,
        memory_limit_bytes: int | None = None,
        memory_budget: int | None = None,
        task: Task | None = None,
        text_only: bool = False,
        stands_in: bool = False,
        draft_model: str | None = None,
        uses_heads: bool = False,
        trials: Path | None = None,
        laps: Laps | None = None,
    ) -> None:
        """`model` None: the embedded one. `served_name`: what clients call it; None: as it is called itself.
        `task`: what it is to do, where somebody knows better than its folder says. `text_only`: it is not to
        see, though it could. `stands_in`: it takes the place of another, so its plan has a name.
        `draft_model`: guesses what it says next; `uses_heads`: without one, layers of its own do, if it has
        such. With either it is measured what drafts cost.
        `memory_limit_bytes` takes the place of what the machine has; `memory_headroom` is the share of it
        that is kept free. `memory_budget`: bytes it may take at the most, whatever there is. `trials`: the
        folder where it is remembered what models have been proven to do. `laps`: of the process's start."""
        self.name = served_name or name_of(model)
        self._model = model
        self._task = task
        self._text_only = text_only
        self._plan = f"{name_of(model)}, one process alone" if stands_in else ""
        self._room = Room(self.name, memory_headroom, memory_limit_bytes, memory_budget)
        self._draft_model = draft_model
        self._uses_heads = uses_heads
        self._draft: DraftModel | None = None
        self._trials = trials
        self._laps = laps or Laps()

    def load(self, progress: Progress) -> Model | EncodingModel:
        """See `contract.Loader`."""
        self._laps.lap("start")
        folder = find_folder(self._model, self._inspect)
        config = self._inspect(folder)
        self._laps.lap("imports")
        files = weight_files(folder, self.name)
        self._draft = find_draft(self._draft_model) if self._draft_model else None
        weight_bytes = bytes_of(files) + (self._draft.weight_bytes if self._draft else 0)
        budget = self._room.budget(weight_bytes)
        task = find_task(folder, config, name_of(self._model), self._task)
        prepare_device(budget)
        model, reason = self._attempt(folder, config, task, progress)
        if model is None:
            from worker.models import memory

            memory.release()
            raise ModelError(f"{self.name}: {reason}")
        told = _versions(model.facts, config) | _preparing(folder, model.facts)
        facts = replace(
            model.facts,
            cache_bytes_max=budget.left_for_caches(weight_bytes),
            fingerprint=fingerprint(folder / "config.json", files, told),
            identity=fingerprint(folder / "config.json", files, {}),
            plan=self._plan,
        )
        model = replace(model, facts=facts)
        self._laps.lap("fingerprint")
        log.info("%s", describe(model.facts, config, task, weight_bytes))
        return model

    def device_memory(self) -> Resources:
        """What the model's arrays take. On the model thread."""
        from worker.models import memory

        return memory.taken()

    def _inspect(self, folder: Path) -> ModelConfig:
        config = read_config(folder, self.name)
        require_known(config, self.name)
        return config

    def _attempt(
        self, folder: Path, config: ModelConfig, task: Task, progress: Progress
    ) -> tuple[Model | EncodingModel | None, str]:
        """The model, or why there is none."""
        try:
            if task == "generate":
                return self._generating(folder, config, progress), ""
            if self._draft:
                raise ModelError("it writes no text that a draft model could guess: leave --draft-model out.")
            return self._encoding(folder, config, task, progress), ""
        except ModelError as error:
            return None, str(error).removeprefix(f"{self.name}: ")
        # A family of upstream's leaves the process where a package is not installed.
        except (Exception, SystemExit) as error:  # the load's boundary: whatever it is, the model is at fault
            log.debug("%s: load failed", self.name, exc_info=True)
            return None, explain(error, config)

    def _generating(self, folder: Path, config: ModelConfig, progress: Progress) -> Model:
        from worker.models.tokenizers import Tokenizers

        self._laps.lap("imports")
        tokenizers = Tokenizers(folder, config, TOKENIZERS + bool(self._draft))
        drafter = self._drafter(folder, tokenizers)
        if config.kind == "vision" and not self._text_only:
            model, reason = self._seeing(folder, config, tokenizers, drafter, progress)
            if model is not None:
                return model
            # From outside the handler, as in `load`: there is room for one set of weights.
            from worker.models import memory

            memory.release()
            log.warning("%s: its images are not served, only text: %s", self.name, reason)
        return self._reading(folder, config, tokenizers, drafter, progress)

    def _drafter(self, folder: Path, tokenizers: Tokenizers) -> Drafter | None:
        config = self._draft.config if self._draft else None
        if self._draft is None or config is None:
            return None
        from worker.models.trials import Trials

        weight_bytes = bytes_of(weight_files(folder, self.name))
        drafter = load_draft(self._draft, config, weight_bytes, tokenizers.take(), Trials(self._trials))
        self._laps.lap("draft model")
        return drafter

    def _reading(
        self,
        folder: Path,
        config: ModelConfig,
        tokenizers: Tokenizers,
        drafter: Drafter | None,
        progress: Progress,
    ) -> Model:
        if reads(config):
            from worker.models.rehearsal import open_text

            network = load_weights(folder, progress)
            self._laps.lap("weights")
            return self._built(folder, config, network, open_text, tokenizers, drafter)
        from worker.models.whole import like, load_network, try_text

        network = load_network(folder)
        evaluate(network, progress)
        self._laps.lap("weights")
        try_text(network)
        return self._built(folder, config, network, like(network), tokenizers, drafter)

    def _seeing(
        self,
        folder: Path,
        config: ModelConfig,
        tokenizers: Tokenizers,
        drafter: Drafter | None,
        progress: Progress,
    ) -> tuple[Model | None, str]:
        """The model with its eyes, or why it cannot be served with them."""
        from worker.models.vision import require_files, require_tower
        from worker.models.whole import load_network

        laps = self._laps
        try:
            require_files(folder)
            laps.lap("imports")
            network = load_network(folder)
            require_tower(network)
            eyes = self._opened(folder, network, progress)
            evaluate(network, progress)  # done at once where its eyes were tried just now
            laps.lap("weights")
            return self._built(folder, config, network, load_network, tokenizers, drafter, eyes), ""
        except (Exception, SystemExit) as error:  # the load's boundary, as in `_attempt`
            log.debug("%s: cannot see", self.name, exc_info=True)
            return None, explain_blindness(error)

    def _opened(self, folder: Path, network: VisionNetwork, progress: Progress) -> Eyes:
        """A model's eyes, which are tried the first time. Raises one of many errors."""
        from worker.models.eyes import Eyes, Found
        from worker.models.processor import Opening
        from worker.models.trials import Trials, key_of
        from worker.models.vision import look_for_places, reserved_by, try_eyes

        laps, processor, reserved = self._laps, Opening(folder), reserved_by(network)

        def prove() -> Found:
            found = look_for_places(folder, processor())
            laps.lap("eyes")
            evaluate(network, progress)
            laps.lap("weights")
            token_bytes = try_eyes(Eyes(processor, found, reserved), processor(), network, folder)
            return replace(found, token_bytes=token_bytes)

        found = Trials(self._trials).sight(key_of(folder, weight_files(folder, self.name), network), prove)
        laps.lap("eyes")
        return Eyes(processor, found, reserved)

    def _built(
        self,
        folder: Path,
        config: ModelConfig,
        network: Any,
        opened: Open,
        tokenizers: Tokenizers,
        drafter: Drafter | None,
        eyes: Eyes | None = None,
    ) -> Model:
        """The model around a network whose weights are there, tried and warm. `opened`: how it was loaded."""
        from worker.engine.caches.trial import find_abilities
        from worker.models.rehearsal import stage_for
        from worker.models.text import build_text_model
        from worker.models.trials import Trials, key_of

        laps = self._laps
        abilities = Trials(self._trials).abilities(
            key_of(folder, weight_files(folder, self.name), network),
            lambda: find_abilities(stage_for(folder, network, opened)),
        )
        laps.lap("trial")
        if not abilities.cut and not reads(config):
            raise ModelError(_UNCUT)
        if self._draft and not abilities.ahead:
            reasons = "; ".join(abilities.reasons)
            raise ModelError(f"no drafts can be tried on it ({reasons}): leave --draft-model out.")
        if drafter is None and abilities.ahead:
            drafter = self._listener(folder, network)
        model = build_text_model(
            self.name, folder, config, network, eyes, drafter, abilities=abilities, tokenizers=tokenizers
        )
        laps.lap("tokenizer")
        warm_up(model.engine, rows=2)
        if abilities.ahead and (self._draft or self._uses_heads):
            model = replace(model, column_price=column_price(model.engine))
        laps.lap("warm-up")
        return model

    def _listener(self, folder: Path, network: Any) -> Drafter | None:
        """Who guesses by what the network thinks, if anybody does."""
        from worker.models.heads import load_heads

        drafter: Drafter | None = None
        if self._draft is not None:
            from worker.models.trained import load_trained

            drafter = load_trained(self._draft, network)
            self._laps.lap("draft model")
        elif self._uses_heads:
            drafter = load_heads(folder, network, self.name)
            self._laps.lap("prediction layers")
        return drafter

    def _encoding(self, folder: Path, config: ModelConfig, task: Task, progress: Progress) -> EncodingModel:
        from worker.models.encoding import build_encoding_model, load_network

        self._laps.lap("imports")
        network = load_network(folder, config, task)
        evaluate(network, progress)
        self._laps.lap("weights")
        model = build_encoding_model(self.name, folder, config, task, network)
        self._laps.lap("tokenizer")
        return model


def load_weights(folder: Path, progress: Progress) -> Any:
    """Upstream's model with its parameters in memory: an `mlx.nn.Module`. Raises one of many errors."""
    from mlx_lm.utils import load_model

    network, _ = load_model(folder, lazy=True)
    evaluate(network, progress)
    return network


def evaluate(network: Any, progress: Progress) -> None:
    """Have a network's parameters in memory: group after group, and say so."""
    import mlx.core as mx

    from worker.engine.trees import arrays_of

    parameters = list(arrays_of(network.parameters()).values())
    total = sum(parameter.nbytes for parameter in parameters)
    progress(0, total)
    done = evaluated = 0
    group: list[mx.array] = []
    for index, parameter in enumerate(parameters):
        group.append(parameter)
        done += parameter.nbytes
        if done - evaluated >= GROUP_BYTES or index == len(parameters) - 1:
            mx.eval(group)
            evaluated = done
            group.clear()
            progress(done, total)


def warm_up(engine: Engine, rows: int) -> None:
    """Run every kind of step once, so that no request waits for a kernel to be compiled."""
    draws = (Draw(), Draw(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1))
    names = [str(row) for row in range(rows)]
    engine.prefill(dict.fromkeys(names, _WARM_PROMPT[:-1]))
    for row, draw in zip(names, draws, strict=False):
        engine.start(row, _WARM_PROMPT, len(_WARM_PROMPT), draw)
    for _ in range(_WARM_STEPS):
        engine.step()
    engine.reset()


def _versions(facts: Facts, config: ModelConfig) -> dict[str, str]:
    """Of what fills caches, and lays them out."""
    libraries = ["mlx", "mlx-lm"]
    if facts.capabilities.images or not reads(config):
        libraries.append("mlx-vlm")
    return {name: metadata.version(name) for name in libraries}


def _preparing(folder: Path, facts: Facts) -> dict[str, str]:
    """How images are prepared: two with one digest are otherwise the same."""
    files = sorted(folder.glob("*processor_config.json")) if facts.capabilities.images else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
