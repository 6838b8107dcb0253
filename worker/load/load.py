"""Load the one model of this process: read its config, check that it fits, load its weights, warm it up.

Everything runs on the model thread. A failed load leaves no weights in memory: its error is raised outside
the handler, because a traceback keeps the locals of all its frames alive.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.common.expert_plan import ExpertPlan, ExpertPlanError, plan_experts
from protocol.common.model_folder import name_of, original_name
from protocol.tasks import Task
from protocol.types import Exactness, ExpertStatus, Resources
from worker.interfaces import AdapterError, DraftProposer, EmbeddingModel, Model, ModelError, Progress
from worker.load.config import ModelConfig, find_task, forbid_remote_code, in_mlx_lm, inspect_folder
from worker.load.device import MemoryFit, prepare_device
from worker.load.drafters.draft_model import DraftModel, find_draft, load_draft
from worker.load.explain import describe, explain, explain_missing_images, raise_if_transient
from worker.load.options import LoadOptions
from worker.load.probe_results import ProbeResults, key_of
from worker.load.source import bytes_of, find_folder, fingerprint, lossy, weight_files
from worker.load.weights import evaluate, load_weights, position_cost, warm_up
from worker.process.startup_timer import StartupTimer
from worker.values import ModelInfo

if TYPE_CHECKING:
    from worker.input.media.preprocessing import ImagePreprocessor
    from worker.load.text import Tokenizers
    from worker.load.weights import Open
    from worker.runner.vision import VisionNetwork

log = logging.getLogger(__name__)

TOKENIZERS = 3
"""Tokenizers to open: one for each thread of the preparation pool, and one for the model thread."""
_UNCUT = "its answers depend on where a prompt is cut into chunks, and upstream cuts elsewhere."
"""Refuses models that only mlx-vlm implements; others are served, with this limitation in the log."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What is known of a model before its weights are read."""

    folder: Path
    config: ModelConfig
    weights: Sequence[Path]
    progress: Progress


class ModelLoader:
    """`Loader` for a model folder, a Hugging Face id, or the embedded model."""

    def __init__(
        self, model: str | None, options: LoadOptions | None = None, *, timer: StartupTimer | None = None
    ) -> None:
        """`model`: folder or id; None: the embedded one."""
        options = options or LoadOptions()
        self.name = options.served_name or name_of(model)
        self._model = model
        self._options = options
        self._plan = f"{name_of(model)}, one process alone" if options.stands_in else ""
        self._memory_fit = MemoryFit.of(self.name, options)
        self._experts: ExpertPlan | None = None
        self._expert_status: Callable[[], ExpertStatus] | None = None
        self._draft: DraftModel | None = None
        self._results = ProbeResults(options.probe_folder)
        self._timer = timer or StartupTimer()

    def load(self, progress: Progress) -> Model | EmbeddingModel:
        self._timer.lap("start")
        options = self._options
        folder, config = find_model(self._model, self.name)
        self._timer.lap("imports")
        files = _Files(folder, config, weight_files(folder, self.name), progress)
        self._draft = find_draft(options.draft_model) if options.draft_model else None
        task = find_task(folder, config, original_name(self._model), options.task)
        if options.experts_memory is not None:
            self._experts = self._planned(files, task, options.experts_memory)
        weight_bytes = bytes_of(files.weights) + (self._draft.weight_bytes if self._draft else 0)
        weight_bytes -= self._experts.saved_bytes if self._experts else 0
        budget = self._memory_fit.budget(weight_bytes)
        prepare_device(budget, is_exact=options.exactness != "none")
        model, reason = self._attempt(files, task)
        if model is None:
            from worker.load import memory

            memory.release()
            raise ModelError(f"{self.name}: {reason}")
        self._memory_fit.wire([*files.weights, *(self._draft.files if self._draft else ())])
        cache_bytes_max = self._memory_fit.left_for_caches(budget, weight_bytes)
        model = replace(model, info=self._identified(model.info, files, cache_bytes_max))
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

    def _planned(self, files: _Files, task: Task, limit: int) -> ExpertPlan | None:
        """Return which experts stay on disk; None: none. Raises `ModelError`."""
        from worker.load.experts import require_experts

        try:
            require_experts(files.config, task, text_only=self._options.text_only)
            return plan_experts(files.weights, limit)
        except (ModelError, ExpertPlanError) as error:
            raise ModelError(f"{self.name}: {error}") from None

    def _identified(self, info: ModelInfo, files: _Files, cache_bytes_max: int) -> ModelInfo:
        """Return the description of the loaded model with what identifies it."""
        settings, config = lossy(info), files.folder / "config.json"
        means = _versions(info, files.config) | _preparing(files.folder, info) | settings
        return replace(
            info,
            cache_bytes_max=cache_bytes_max,
            fingerprint=fingerprint(config, files.weights, means),
            identity=fingerprint(config, files.weights, settings),
            plan=self._plan,
        )

    def _attempt(self, files: _Files, task: Task) -> tuple[Model | EmbeddingModel | None, str]:
        """Return the model, or the reason why it cannot be loaded."""
        try:
            return (self._generating(files) if task == "generate" else self._encoding(files, task)), ""
        except ModelError as error:
            return None, str(error).removeprefix(f"{self.name}: ")
        # One of upstream's families exits the process if a package is not installed.
        except (Exception, SystemExit) as error:  # boundary of the load: else it is the model's fault
            raise_if_transient(error, self.name)
            return None, explain(error, files.config)

    def _generating(self, files: _Files) -> Model:
        from worker.load.text import Tokenizers

        self._timer.lap("imports")
        options, config = self._options, files.config
        if options.kv_quantization:
            self._require_plain_text(config)
        tokenizers = Tokenizers(files.folder, config, TOKENIZERS + bool(self._draft), options.parsers)
        drafter = self._drafter(files, tokenizers)
        if config.kind != "vision" or options.text_only:
            return self._reading(files, tokenizers, drafter)
        model, reason = self._seeing(files, tokenizers, drafter)
        if model is not None:
            return model
        # Outside the handler, as in `load`: memory holds only one set of weights.
        from worker.load import memory

        memory.release()
        log.warning("%s: its images are not served, only text: %s", self.name, reason)
        model = self._reading(files, tokenizers, drafter)
        able = msgspec.structs.replace(model.info.capabilities, image_problem=reason)
        return replace(model, info=replace(model.info, capabilities=able))

    def _require_plain_text(self, config: ModelConfig) -> None:
        """Raise `ModelError` for a model of mlx-vlm's, which quantizes other layers elsewhere, and if passes
        must be exact: those over quantized caches are not measured."""
        if self._options.exactness == "limits":
            raise ModelError("--exact cannot be combined with --kv-bits: leave one of them out.")
        if not in_mlx_lm(config):
            raise ModelError("only mlx-vlm implements it, and its KV caches stay exact: leave --kv-bits out.")
        if config.kind == "vision" and not self._options.text_only:
            raise ModelError("--kv-bits is for text only: leave it out, or add --text-only.")

    def _drafter(self, files: _Files, tokenizers: Tokenizers) -> DraftProposer | None:
        config = self._draft.config if self._draft else None
        if self._draft is None or config is None:
            return None
        drafter = load_draft(self._draft, config, bytes_of(files.weights), tokenizers.take(), self._results)
        self._timer.lap("draft model")
        return drafter

    def _reading(self, files: _Files, tokenizers: Tokenizers, drafter: DraftProposer | None) -> Model:
        """Return the model of text. With a plan for experts, these are read from disk."""
        if self._experts is not None:
            from worker.load.experts import open_network

            network, memory, opened, parameters = open_network(self._experts, files.folder)
            evaluate(network, files.progress)
            self._timer.lap("weights")
            model = self._built(files, network, opened, tokenizers, drafter)
            self._expert_status = memory.status
            log.info("%s: %s", self.name, self._experts.described)
            return replace(model, info=replace(model.info, parameters=parameters))
        if in_mlx_lm(files.config):
            from worker.load.weights import open_text

            network = load_weights(files.folder, files.progress)
            self._timer.lap("weights")
            return self._built(files, network, open_text, tokenizers, drafter)
        from worker.load.vlm_text import like, load_network, try_text

        network = load_network(files.folder)
        evaluate(network, files.progress)
        self._timer.lap("weights")
        try_text(network)
        return self._built(files, network, like(network), tokenizers, drafter)

    def _seeing(
        self, files: _Files, tokenizers: Tokenizers, drafter: DraftProposer | None
    ) -> tuple[Model | None, str]:
        """Return the model with image input, or the reason why its images cannot be served. Raises what says
        nothing about the model: a next attempt may succeed."""
        from worker.load.vision import require_files, require_tower
        from worker.load.vlm_text import load_network

        try:
            require_files(files.folder)
            self._timer.lap("imports")
            network = load_network(files.folder)
            require_tower(network)
            image_preprocessor = self._opened(files, network)
            evaluate(network, files.progress)  # already evaluated if image input was just probed
            self._timer.lap("weights")
            return self._built(files, network, load_network, tokenizers, drafter, image_preprocessor), ""
        except (Exception, SystemExit) as error:  # boundary of the load, as in `_attempt`
            raise_if_transient(error, self.name)
            return None, explain_missing_images(error)

    def _opened(self, files: _Files, network: VisionNetwork) -> ImagePreprocessor:
        """Open the image preprocessor; probe image input unless the result is kept. Raises anything."""
        from worker.input.media.preprocessing import ImagePlaceholders, ImagePreprocessor
        from worker.input.media.processor import LazyProcessor
        from worker.load.vision import find_placeholders, probe_images, reserved_by

        timer, folder = self._timer, files.folder
        processor, reserved = LazyProcessor(folder), reserved_by(network)
        key = key_of(folder, files.weights, network, "placeholders")
        found = self._results.read(key, ImagePlaceholders)
        if found is None:
            found = find_placeholders(folder, processor())
            timer.lap("images")
            evaluate(network, files.progress)
            timer.lap("weights")
            preprocessor = ImagePreprocessor(processor, found, reserved)
            found = replace(found, token_bytes=probe_images(preprocessor, processor(), network, folder))
            self._results.write(key, found)
        timer.lap("images")
        return ImagePreprocessor(processor, found, reserved)

    def _built(
        self,
        files: _Files,
        network: Any,
        opened: Open,
        tokenizers: Tokenizers,
        drafter: DraftProposer | None,
        image_preprocessor: ImagePreprocessor | None = None,
    ) -> Model:
        """Build the model around a loaded network, and warm it up. `opened`: how it was loaded."""
        from worker.load.capabilities import capabilities_of, require_drafts
        from worker.load.text import build_text_model

        timer, kv = self._timer, self._options.kv_quantization
        capabilities = capabilities_of(files.folder, network, files.weights, self._results, opened, kv)
        timer.lap("trial")
        if not capabilities.cut and not in_mlx_lm(files.config):
            raise ModelError(_UNCUT)
        if self._draft:
            require_drafts(capabilities)
        if drafter is None and capabilities.ahead:
            drafter = self._mtp_drafter(files.folder, network)
        model = build_text_model(
            self.name,
            files.folder,
            files.config,
            network,
            image_preprocessor,
            drafter,
            capabilities=capabilities,
            tokenizers=tokenizers,
            kv_quantization=kv,
        )
        timer.lap("tokenizer")
        warm_up(model.engine, rows=2)
        model, can_verify = self._limited(model, network, files)
        speculation = self._options.speculation or ("auto" if model.engine.drafter else "off")
        if can_verify and speculation == "auto":
            model = replace(model, position_cost=position_cost(model.engine))
        timer.lap("warm-up")
        return self._with_adapters(model)

    def _limited(self, model: Model, network: Any, files: _Files) -> tuple[Model, bool]:
        """Return the model after `--exact` or `doctor` have done their part, and whether drafts are verified.
        Raises `ModelError`."""
        from worker.load.exactness import exactness_key, limit_passes, measure_model
        from worker.runner.runner import BatchEngine

        options, engine = self._options, model.engine
        assert isinstance(engine, BatchEngine), "it was just built"
        if options.exactness == "none":
            return model, engine.capabilities.ahead
        results = ProbeResults(options.exactness_folder)
        settings = str(options.kv_quantization), str(bool(self._experts))
        key = exactness_key(files.folder, files.weights, network, *settings)
        if options.exactness == "limits":
            exactness = limit_passes(self.name, engine, results.read(key, Exactness))
        else:
            exactness = measure_model(engine, network)
            results.write(key, exactness)
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
        adapters = self._options.adapters
        if self._options.exactness == "limits":
            if adapters:
                raise ModelError(
                    "with --exact no adapters are served, because rows with different ones are not computed"
                    " bit by bit as alone: leave --exact or --adapter out."
                )
            return replace(model, adapters=None)
        assert model.adapters is not None, "a model of one process serves adapters"
        for name, folder in adapters:
            try:
                # What they leave for the caches is checked with the context length.
                model.adapters.load(name, folder, bytes_max=2**62)
            except AdapterError as error:
                raise ModelError(f"the adapter {name} cannot be served: {error} ({folder}).") from None
        if adapters:
            self._timer.lap("adapters")
        return model

    def _mtp_drafter(self, folder: Path, network: Any) -> DraftProposer | None:
        """Load the drafter that reads the network's hidden states, if there is one."""
        from worker.load.drafters.mtp_layers import load_own_layers, load_separate_layers

        drafter: DraftProposer | None = None
        if self._draft is not None:
            drafter = load_separate_layers(self._draft, network)
        elif self._options.speculation != "off" and self._experts is None:
            drafter = load_own_layers(folder, network, self.name)
        if drafter is not None:
            self._timer.lap("prediction layers")
        return drafter

    def _encoding(self, files: _Files, task: Task) -> EmbeddingModel:
        from worker.load.embedding import build_encoding_model, load_network

        for is_asked, what, option in (
            (self._options.adapters, "so it serves no adapters", "--adapter"),
            (self._options.kv_quantization, "so it has no KV caches", "--kv-bits"),
            (self._draft, "so it cannot use a draft model", "--draft-model"),
        ):
            if is_asked:
                raise ModelError(f"it generates no text, {what}: leave {option} out.")
        self._timer.lap("imports")
        network = load_network(files.folder, files.config, task)
        evaluate(network, files.progress)
        self._timer.lap("weights")
        model = build_encoding_model(self.name, files.folder, files.config, task, network)
        self._timer.lap("tokenizer")
        return model


def find_model(model: str | None, name: str) -> tuple[Path, ModelConfig]:
    """Return a model's folder and config, for a process that runs no code of models from now on. Raises
    `ModelError`."""
    forbid_remote_code()
    inspect = partial(inspect_folder, name=name)
    folder = find_folder(model, inspect)
    return folder, inspect(folder)


def _versions(facts: ModelInfo, config: ModelConfig) -> dict[str, str]:
    """Return the versions of the libraries that determine the contents and layout of caches."""
    libraries = ["mlx", "mlx-lm"]
    if facts.capabilities.images or not in_mlx_lm(config):
        libraries.append("mlx-vlm")
    return {name: metadata.version(name) for name in libraries}


def _preparing(folder: Path, facts: ModelInfo) -> dict[str, str]:
    """Return digests of the image processor's configs: an image's digest does not cover them."""
    files = sorted(folder.glob("*processor_config.json")) if facts.capabilities.images else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
