"""Load the one model of this process: read its config, check that it fits, load its weights, warm it up.

Everything runs on the model thread. A failed load leaves no weights in memory: its error is raised outside
the handler, because a traceback keeps the locals of all its frames alive.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from protocol.common.expert_plan import ExpertPlan, ExpertPlanError, plan_experts
from protocol.common.model_folder import name_of, original_name
from protocol.settings.parsers import RECOGNIZED, NamedParsers
from protocol.tasks import Task
from protocol.types import ExpertStatus, Resources, Wired
from worker.interfaces import AdapterError, DraftProposer, EmbeddingModel, Model, ModelError, Progress
from worker.load.config import ModelConfig, read_config, reads, require_known
from worker.load.device import MemoryFit, prepare_device
from worker.load.drafters.draft_model import DraftModel, find_draft, load_draft
from worker.load.explain import describe, explain, explain_blindness, is_transient
from worker.load.fingerprint import fingerprint, lossy
from worker.load.probe_results import ProbeResults, key_of
from worker.load.probes.verify_cost import position_cost
from worker.load.remote_code import forbid_remote_code
from worker.load.source import bytes_of, find_folder, weight_files
from worker.load.tasks import find_task
from worker.load.weights import evaluate, load_weights, warm_up
from worker.process.device_errors import raise_if_device_failed
from worker.process.startup_timer import StartupTimer
from worker.values import KVQuantization, ModelInfo

if TYPE_CHECKING:
    from worker.input.media.preprocessing import ImagePreprocessor
    from worker.load.exactness import ExactnessUse
    from worker.load.tokenizers import Tokenizers
    from worker.load.weights import Open
    from worker.runner.vision import VisionNetwork

log = logging.getLogger(__name__)

TOKENIZERS = 3
"""Tokenizers to open: one for each thread of the preparation pool, and one for the model thread."""
_UNCUT = "its answers depend on where a prompt is cut into chunks, and upstream cuts elsewhere."
"""Refuses models that only mlx-vlm implements; others are served, with this limitation in the log."""


class ModelLoader:
    """`Loader` for a model folder, a Hugging Face id, or the embedded model."""

    def __init__(
        self,
        model: str | None,
        *,
        served_name: str | None = None,
        memory_headroom: float = 0.1,
        memory_limit_bytes: int | None = None,
        memory_budget: int | None = None,
        wired: Wired = "weights",
        task: Task | None = None,
        text_only: bool = False,
        parsers: NamedParsers = RECOGNIZED,
        stands_in: bool = False,
        draft_model: str | None = None,
        speculation: Literal["auto", "off"] | None = None,
        exactness: ExactnessUse = "none",
        exactness_folder: Path | None = None,
        adapters: Sequence[tuple[str, Path]] = (),
        kv_quantization: KVQuantization | None = None,
        experts_memory: int | None = None,
        probe_cache_folder: Path | None = None,
        timer: StartupTimer | None = None,
    ) -> None:
        """`model`: folder or id; None: the embedded one. `served_name`: its name for clients; None: its own.
        `task`: overrides the detected task. `text_only`: serve a vision model without images. `parsers`: the
        formats of its output, if named. `stands_in`: it replaces another model, so its plan gets a name.
        `draft_model`: folder or id of a draft model; without one, the model's own MTP layers draft, if any,
        unless `speculation` is off. `exactness`: whether to measure which passes are exact, or to keep to
        those that were measured to be; `exactness_folder`: where that is kept. `adapters`: names and folders.
        `kv_quantization`: how its KV caches are quantized; None: not. `experts_memory`: bytes of experts in
        memory; the others are read from disk when needed.
        `memory_limit_bytes`: replaces the machine's memory; `memory_headroom`: share of it to keep free.
        `memory_budget`: the process's most bytes. `wired`: what macOS may not page out.
        `probe_cache_folder`: where probe results are cached."""
        self.name = served_name or name_of(model)
        self._model = model
        self._task = task
        self._text_only = text_only
        self._parsers = parsers
        self._plan = f"{name_of(model)}, one process alone" if stands_in else ""
        self._memory_fit = MemoryFit(self.name, memory_headroom, memory_limit_bytes, memory_budget, wired)
        self._draft_model = draft_model
        self._speculation = speculation
        self._exactness, self._exactness_folder = exactness, exactness_folder
        self._adapters = adapters
        self._kv_quantization = kv_quantization
        self._experts_memory = experts_memory
        self._experts: ExpertPlan | None = None
        self._expert_status: Callable[[], ExpertStatus] | None = None
        self._draft: DraftModel | None = None
        self._results = ProbeResults(probe_cache_folder)
        self._timer = timer or StartupTimer()

    def load(self, progress: Progress) -> Model | EmbeddingModel:
        self._timer.lap("start")
        forbid_remote_code()
        folder = find_folder(self._model, self._inspect)
        config = self._inspect(folder)
        self._timer.lap("imports")
        files = weight_files(folder, self.name)
        self._draft = find_draft(self._draft_model) if self._draft_model else None
        task = find_task(folder, config, original_name(self._model), self._task)
        if self._experts_memory is not None:
            self._experts = self._planned(files, config, task, self._experts_memory)
        weight_bytes = bytes_of(files) + (self._draft.weight_bytes if self._draft else 0)
        weight_bytes -= self._experts.saved_bytes if self._experts else 0
        budget = self._memory_fit.budget(weight_bytes)
        prepare_device(budget, is_exact=self._exactness != "none")
        model, reason = self._attempt(folder, config, task, progress)
        if model is None:
            from worker.load import memory

            memory.release()
            raise ModelError(f"{self.name}: {reason}")
        self._memory_fit.wire([*files, *(self._draft.files if self._draft else ())])
        settings = lossy(model.info)
        told = _versions(model.info, config) | _preparing(folder, model.info) | settings
        facts = replace(
            model.info,
            cache_bytes_max=self._memory_fit.left_for_caches(budget, weight_bytes),
            fingerprint=fingerprint(folder / "config.json", files, told),
            identity=fingerprint(folder / "config.json", files, settings),
            plan=self._plan,
        )
        model = replace(model, info=facts)
        self._timer.lap("fingerprint")
        log.info("%s", describe(model.info, config, task, weight_bytes))
        return model

    def device_memory(self) -> Resources:
        """Return the memory of the model's arrays. Call on the model thread."""
        from worker.load import memory

        taken = memory.taken()
        if self._expert_status is None:
            return taken
        return msgspec.structs.replace(taken, experts=self._expert_status())

    def _planned(
        self, files: Sequence[Path], config: ModelConfig, task: Task, limit: int
    ) -> ExpertPlan | None:
        """Return which experts stay on disk; None: none. Raises `ModelError`."""
        from worker.load.experts import require_experts

        try:
            require_experts(config, task, text_only=self._text_only)
            return plan_experts(files, limit)
        except (ModelError, ExpertPlanError) as error:
            raise ModelError(f"{self.name}: {error}") from None

    def _inspect(self, folder: Path) -> ModelConfig:
        config = read_config(folder, self.name)
        require_known(config, self.name)
        return config

    def _attempt(
        self, folder: Path, config: ModelConfig, task: Task, progress: Progress
    ) -> tuple[Model | EmbeddingModel | None, str]:
        """Return the model, or the reason why it cannot be loaded."""
        try:
            if task == "generate":
                return self._generating(folder, config, progress), ""
            if self._adapters:
                raise ModelError("it generates no text, so it serves no adapters: leave --adapter out.")
            if self._kv_quantization:
                raise ModelError("it generates no text, so it has no KV caches: leave --kv-bits out.")
            if self._draft:
                raise ModelError(
                    "it generates no text, so it cannot use a draft model: leave --draft-model out."
                )
            return self._encoding(folder, config, task, progress), ""
        except ModelError as error:
            return None, str(error).removeprefix(f"{self.name}: ")
        # One of upstream's families exits the process if a package is not installed.
        except (Exception, SystemExit) as error:  # boundary of the load: else it is the model's fault
            raise_if_device_failed(error)
            if is_transient(error):
                raise
            log.debug("%s: load failed", self.name, exc_info=True)
            return None, explain(error, config)

    def _generating(self, folder: Path, config: ModelConfig, progress: Progress) -> Model:
        from worker.load.tokenizers import Tokenizers

        self._timer.lap("imports")
        if self._kv_quantization:
            self._require_plain_text(config)
        tokenizers = Tokenizers(folder, config, TOKENIZERS + bool(self._draft), self._parsers)
        drafter = self._drafter(folder, tokenizers)
        if config.kind != "vision" or self._text_only:
            return self._reading(folder, config, tokenizers, drafter, progress)
        model, reason = self._seeing(folder, config, tokenizers, drafter, progress)
        if model is not None:
            return model
        # Outside the handler, as in `load`: memory holds only one set of weights.
        from worker.load import memory

        memory.release()
        log.warning("%s: its images are not served, only text: %s", self.name, reason)
        model = self._reading(folder, config, tokenizers, drafter, progress)
        able = msgspec.structs.replace(model.info.capabilities, image_problem=reason)
        return replace(model, info=replace(model.info, capabilities=able))

    def _require_plain_text(self, config: ModelConfig) -> None:
        """Raise `ModelError` for a model of mlx-vlm's, which quantizes other layers elsewhere, and if passes
        must be measured: those over quantized caches are not."""
        if self._exactness == "limits":
            raise ModelError("--exact cannot be combined with --kv-bits: leave one of them out.")
        if not reads(config):
            raise ModelError("only mlx-vlm implements it, and its KV caches stay exact: leave --kv-bits out.")
        if config.kind == "vision" and not self._text_only:
            raise ModelError("--kv-bits is for text only: leave it out, or add --text-only.")

    def _drafter(self, folder: Path, tokenizers: Tokenizers) -> DraftProposer | None:
        config = self._draft.config if self._draft else None
        if self._draft is None or config is None:
            return None
        weight_bytes = bytes_of(weight_files(folder, self.name))
        drafter = load_draft(self._draft, config, weight_bytes, tokenizers.take(), self._results)
        self._timer.lap("draft model")
        return drafter

    def _reading(
        self,
        folder: Path,
        config: ModelConfig,
        tokenizers: Tokenizers,
        drafter: DraftProposer | None,
        progress: Progress,
    ) -> Model:
        if reads(config):
            from worker.load.weights import open_text

            if self._experts is not None:
                return self._streaming(self._experts, folder, config, tokenizers, drafter, progress)
            network = load_weights(folder, progress)
            self._timer.lap("weights")
            return self._built(folder, config, network, open_text, tokenizers, drafter)
        from worker.load.vlm_text import like, load_network, try_text

        network = load_network(folder)
        evaluate(network, progress)
        self._timer.lap("weights")
        try_text(network)
        return self._built(folder, config, network, like(network), tokenizers, drafter)

    def _streaming(
        self,
        plan: ExpertPlan,
        folder: Path,
        config: ModelConfig,
        tokenizers: Tokenizers,
        drafter: DraftProposer | None,
        progress: Progress,
    ) -> Model:
        """Return the model whose experts are read from disk."""
        from worker.load.experts import open_network

        network, memory, opened, parameters = open_network(plan, folder)
        evaluate(network, progress)
        self._timer.lap("weights")
        model = self._built(folder, config, network, opened, tokenizers, drafter)
        self._expert_status = memory.status
        log.info("%s: %s", self.name, plan.described)
        return replace(model, info=replace(model.info, parameters=parameters))

    def _seeing(
        self,
        folder: Path,
        config: ModelConfig,
        tokenizers: Tokenizers,
        drafter: DraftProposer | None,
        progress: Progress,
    ) -> tuple[Model | None, str]:
        """Return the model with image input, or the reason why its images cannot be served. Raises what says
        nothing about the model: a next attempt may succeed."""
        from worker.load.vision import require_files, require_tower
        from worker.load.vlm_text import load_network

        timer = self._timer
        try:
            require_files(folder)
            timer.lap("imports")
            network = load_network(folder)
            require_tower(network)
            image_preprocessor = self._opened(folder, network, progress)
            evaluate(network, progress)  # already evaluated if image input was just probed
            timer.lap("weights")
            return self._built(
                folder, config, network, load_network, tokenizers, drafter, image_preprocessor
            ), ""
        except (Exception, SystemExit) as error:  # boundary of the load, as in `_try_load`
            raise_if_device_failed(error)
            if is_transient(error):
                raise
            log.debug("%s: loading with images failed", self.name, exc_info=True)
            return None, explain_blindness(error)

    def _opened(self, folder: Path, network: VisionNetwork, progress: Progress) -> ImagePreprocessor:
        """Open the image preprocessor; probe image input unless the result is cached. Raises anything."""
        from worker.input.media.preprocessing import ImagePlaceholders, ImagePreprocessor
        from worker.input.media.processor import LazyProcessor
        from worker.load.vision import look_for_places, reserved_by, try_eyes

        timer, processor, reserved = self._timer, LazyProcessor(folder), reserved_by(network)

        key = key_of(folder, weight_files(folder, self.name), network, "placeholders")
        found = self._results.read(key, ImagePlaceholders)
        if found is None:
            found = look_for_places(folder, processor())
            timer.lap("eyes")
            evaluate(network, progress)
            timer.lap("weights")
            preprocessor = ImagePreprocessor(processor, found, reserved)
            found = replace(found, token_bytes=try_eyes(preprocessor, processor(), network, folder))
            self._results.write(key, found)
        timer.lap("eyes")
        return ImagePreprocessor(processor, found, reserved)

    def _built(
        self,
        folder: Path,
        config: ModelConfig,
        network: Any,
        opened: Open,
        tokenizers: Tokenizers,
        drafter: DraftProposer | None,
        image_preprocessor: ImagePreprocessor | None = None,
    ) -> Model:
        """Build the model around a loaded network, probe it and warm it up. `opened`: how it was
        loaded."""
        from worker.load.capabilities import capabilities_of
        from worker.load.probes.kv_quantization import require_quantizable
        from worker.load.text import build_text_model

        timer, kv = self._timer, self._kv_quantization
        if kv is not None:
            require_quantizable(network, kv, self.name)
        files = weight_files(folder, self.name)
        capabilities = capabilities_of(folder, network, files, self._results, opened, kv)
        timer.lap("trial")
        if not capabilities.cut and not reads(config):
            raise ModelError(_UNCUT)
        if self._draft and not capabilities.ahead:
            reasons = "; ".join(capabilities.reasons)
            raise ModelError(f"no drafts can be tried on it ({reasons}): leave --draft-model out.")
        if drafter is None and capabilities.ahead:
            drafter = self._listener(folder, network)
        model = build_text_model(
            self.name,
            folder,
            config,
            network,
            image_preprocessor,
            drafter,
            capabilities=capabilities,
            tokenizers=tokenizers,
            kv_quantization=kv,
        )
        timer.lap("tokenizer")
        warm_up(model.engine, rows=2)
        model, can_verify = self._compared(model, network, folder)
        if can_verify and (self._speculation or ("auto" if model.engine.drafter else "off")) == "auto":
            model = replace(model, position_cost=position_cost(model.engine))
        timer.lap("warm-up")
        return self._with_adapters(model)

    def _compared(self, model: Model, network: Any, folder: Path) -> tuple[Model, bool]:
        """Return the model after `--exact` or `doctor` have done their part, and whether drafts are verified.
        Raises `ModelError`."""
        from worker.load.exactness import ExactnessResults
        from worker.runner.runner import BatchEngine

        engine = model.engine
        assert isinstance(engine, BatchEngine), "it was just built"
        if self._exactness == "none":
            return model, engine.capabilities.ahead
        results = ExactnessResults(self._exactness_folder, f"{self._kv_quantization} {bool(self._experts)}")
        use = results.limit if self._exactness == "limits" else results.keep
        exactness = use(self.name, engine, network, folder, weight_files(folder, self.name))
        if self._draft and not engine.capabilities.ahead:
            raise ModelError(
                "with --exact no drafts are verified, because passes of several tokens round differently on"
                " this device, or `roundhouse doctor --model` has not measured them: leave --exact or"
                " --draft-model out."
            )
        self._timer.lap("exactness")
        info = replace(model.info, exactness=exactness, batched=engine.capabilities.together)
        return replace(model, info=info), engine.capabilities.ahead

    def _with_adapters(self, model: Model) -> Model:
        """Return the model with its adapters. Raises `ModelError`."""
        if self._exactness == "limits":
            if self._adapters:
                raise ModelError(
                    "with --exact no adapters are served, because rows with different ones are not computed"
                    " bit by bit as alone: leave --exact or --adapter out."
                )
            return replace(model, adapters=None)
        assert model.adapters is not None, "a model of one process serves adapters"
        for name, folder in self._adapters:
            try:
                # What they leave for the caches is checked with the context length.
                model.adapters.load(name, folder, bytes_max=2**62)
            except AdapterError as error:
                raise ModelError(f"the adapter {name} cannot be served: {error} ({folder}).") from None
        if self._adapters:
            self._timer.lap("adapters")
        return model

    def _listener(self, folder: Path, network: Any) -> DraftProposer | None:
        """Load the drafter that reads the network's hidden states, if there is one."""
        from worker.load.drafters.mtp_layers import load_own_layers, load_separate_layers

        drafter: DraftProposer | None = None
        if self._draft is not None:
            drafter = load_separate_layers(self._draft, network)
        elif self._speculation != "off" and self._experts is None:
            drafter = load_own_layers(folder, network, self.name)
        if drafter is not None:
            self._timer.lap("prediction layers")
        return drafter

    def _encoding(self, folder: Path, config: ModelConfig, task: Task, progress: Progress) -> EmbeddingModel:
        from worker.load.embedding import build_encoding_model, load_network

        self._timer.lap("imports")
        network = load_network(folder, config, task)
        evaluate(network, progress)
        self._timer.lap("weights")
        model = build_encoding_model(self.name, folder, config, task, network)
        self._timer.lap("tokenizer")
        return model


def _versions(facts: ModelInfo, config: ModelConfig) -> dict[str, str]:
    """Return the versions of the libraries that determine the contents and layout of caches."""
    libraries = ["mlx", "mlx-lm"]
    if facts.capabilities.images or not reads(config):
        libraries.append("mlx-vlm")
    return {name: metadata.version(name) for name in libraries}


def _preparing(folder: Path, facts: ModelInfo) -> dict[str, str]:
    """Return digests of the image processor's configs: an image's digest does not cover them."""
    files = sorted(folder.glob("*processor_config.json")) if facts.capabilities.images else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
