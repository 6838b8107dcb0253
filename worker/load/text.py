"""Generative models: a `Model` with engine, preparers and output processors, built around a network."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters
from msgspec.structs import replace

from protocol.common.logs import quiet_libraries
from protocol.settings.parsers import RECOGNIZED, NamedParsers
from protocol.types import Capabilities
from worker.input.locks import OPEN_S_MAX
from worker.input.media.multimodal_prompt import MultimodalPreparer
from worker.input.media.preprocessing import ImagePreprocessor
from worker.input.prompts.format import PROBED_TOOLS, CallFormat, Format, unread
from worker.input.prompts.grammar_choice import GrammarCache
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.input.prompts.render_bound import RenderTimeout
from worker.input.prompts.sampling_defaults import read_defaults
from worker.input.prompts.template import probe, template_of, unlisted_end
from worker.input.prompts.token_bytes import token_bytes_max
from worker.interfaces import DraftProposer, Model, ModelError, OutputProcessor, Preparer
from worker.load import memory
from worker.load.adapters import ServedAdapters
from worker.load.config import ModelConfig
from worker.output.calls.writer import CallNumbering, namer_of
from worker.output.channels import ChannelProcessor
from worker.output.text import TextProcessor, Vocabulary
from worker.runner.kv.capability_probe import BatchCapabilities
from worker.runner.runner import BatchEngine
from worker.runner.sampling.sampler import Agree
from worker.values import EngineRequest, KVQuantization, ModelInfo, SamplingParams

log = logging.getLogger(__name__)


class Tokenizers:
    """Pool of a model's tokenizers, opened while its weights load: each thread needs its own, and each is
    handed out once. `take` may be called on any thread."""

    def __init__(
        self, folder: Path, config: ModelConfig, prefetch: int = 0, parsers: NamedParsers = RECOGNIZED
    ) -> None:
        """`prefetch`: number of tokenizers to open now, one after another, on a separate thread."""
        self._folder, self._config, self._parsers = folder, config, parsers
        self._opened: deque[Future[TokenizerWrapper]] = deque()
        if prefetch:
            executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizers")
            self._opened.extend(executor.submit(self._open) for _ in range(prefetch))
            executor.shutdown(wait=False)

    def take(self) -> TokenizerWrapper:
        """Return a prefetched tokenizer, or open a new one. Raises what upstream raises, or `TimeoutError` if
        a prefetched one is not open within `OPEN_S_MAX` seconds."""
        try:
            future = self._opened.popleft()
        except IndexError:
            return self._open()
        try:
            return future.result(OPEN_S_MAX)
        except TimeoutError:
            raise TimeoutError(f"the tokenizer was not opened within {OPEN_S_MAX:g} s") from None

    def _open(self) -> TokenizerWrapper:
        return open_tokenizer(self._folder, self._config.end_tokens, self._parsers)


def build_text_model(
    name: str,
    folder: Path,
    config: ModelConfig,
    network: nn.Module,
    image_preprocessor: ImagePreprocessor | None = None,
    drafter: DraftProposer | None = None,
    *,
    capabilities: BatchCapabilities | None = None,
    tokenizers: Tokenizers | None = None,
    agree: Agree | None = None,
    kv_quantization: KVQuantization | None = None,
) -> Model:
    """Build the model. `network`: called as `network(tokens, cache=…)`, a `VisionNetwork` if there is an
    `image_preprocessor`. `drafter`: draft proposer. `capabilities`: probe result, if known. `tokenizers`:
    already opened ones. `agree`: see `Sampler`. `kv_quantization`: how rows are quantized, if
    they are. Raises `ModelError` without a tokenizer."""
    tokenizers = tokenizers or Tokenizers(folder, config)
    tokenizer = _first(tokenizers, name, folder)
    defaults, size, grammar_cache = _defaults(folder), config.vocabulary or len(tokenizer), GrammarCache()

    def open_preparer(context_length: int) -> Preparer:
        by_memory = context_length < config.context_length
        rules = PromptRules(context_length, size, defaults, by_memory=by_memory)
        tokenizer = tokenizers.take()
        return (
            MultimodalPreparer(tokenizer, rules, image_preprocessor, grammar_cache)
            if image_preprocessor
            else TextPreparer(tokenizer, rules, grammar_cache)
        )

    engine = BatchEngine(network, capabilities, drafter, agree, kv_quantization)
    # Requests that run one at a time are what an operator must know; other limits cost less.
    level = logging.INFO if engine.capabilities.together else logging.WARNING
    for reason in engine.capabilities.reasons:
        log.log(level, "%s: %s", name, reason)
    seen = image_preprocessor.placeholders if image_preprocessor else {}
    processors = OutputProcessors(tokenizer)
    facts = ModelInfo(
        name=name,
        context_length=config.context_length,
        parameters=get_total_parameters(network),
        capabilities=replace(
            _probe(tokenizer, processors, name), images="image" in seen, videos="video" in seen
        ),
        batched=engine.capabilities.together,
        token_bytes_max=token_bytes_max(tokenizer._tokenizer),
        kv_quantization=kv_quantization,
    )
    adapters = ServedAdapters(engine.adapters)
    return Model(facts, engine, open_preparer, processors.open, adapters, release_memory=memory.release)


def _probe(tokenizer: TokenizerWrapper, processors: OutputProcessors, name: str) -> Capabilities:
    """Probe the template and what is read of its answers; say what an operator must know."""
    try:
        template = template_of(tokenizer)
        found = probe(template, tokenizer)
        if template is None:
            return found
        if template.problem:
            told = "%s: its chat template is broken: %s Only /v1/completions will work."
            log.warning(told, name, template.problem)
        if (end := unlisted_end(template, tokenizer)) is not None:
            told = "%s: %s ends its answers, as its template writes them. List it as eos_token_id."
            log.warning(told, name, tokenizer.decode([end]))
        kinds = unread(template, tokenizer, processors.probed)
        for kind in kinds:
            flag = "tool-call-parser" if kind == "tool_calls" else "reasoning-parser"
            told = "%s: its %s are in an unknown format, and will be text. If you know it: --%s"
            log.warning(told, name, kind.replace("_", " "), flag)
        return replace(found, unread=[*kinds])
    except RenderTimeout as error:
        message = f"{name}: its chat template does not end: {error} Correct the template."
        raise ModelError(message) from None


def _first(tokenizers: Tokenizers, name: str, folder: Path) -> TokenizerWrapper:
    # transformers installs a log handler on import, and warns about every prompt beyond the context, which
    # this server refuses itself.
    quiet_libraries("transformers", logging.ERROR)
    try:
        return tokenizers.take()
    except Exception as error:  # the tokenizers library raises Exception itself
        log.debug("%s: no tokenizer", name, exc_info=True)
        reason = " ".join(str(error).split())
        if not (folder / "tokenizer.json").exists():
            reason = f"there is no tokenizer.json; use a conversion for MLX that has one: {reason}"
        raise ModelError(f"{name}: its tokenizer in {folder} cannot be loaded ({reason}).") from None


class OutputProcessors:
    """Output processors of a model: plain text, or channels if its format has markers."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._vocabulary = Vocabulary(tokenizer._tokenizer)
        self._form = Format(tokenizer, self._vocabulary)
        self._call_form = CallFormat(tokenizer, self._vocabulary)

    def probed(self, state: str, calls: bool) -> OutputProcessor:
        """Return the output processor of an answer with the probe's call, or without tools."""
        if not calls:
            return ChannelProcessor(self._vocabulary, self._form.open(state), self._form.signs, ())
        numbering = CallNumbering(PROBED_TOOLS, str, single=False)
        reading = self._call_form.open(state, numbering)
        return ChannelProcessor(self._vocabulary, reading, self._call_form.signs, ())

    def open(self, engine_request: EngineRequest) -> OutputProcessor:
        """Return the output processor of one request."""
        vocabulary, form, stop = self._vocabulary, self._form, engine_request.stop
        if engine_request.opening is not None and engine_request.tools:
            single = engine_request.single_call
            only, namer = engine_request.calls_only, namer_of(engine_request)
            calls = CallNumbering(engine_request.tools, namer, single=single, only=only)
            reading = self._call_form.open(engine_request.opening, calls)
            return ChannelProcessor(vocabulary, reading, self._call_form.signs, stop, single_call=single)
        if engine_request.opening is None or form.is_plain:
            return TextProcessor(vocabulary, stop)
        return ChannelProcessor(vocabulary, form.open(engine_request.opening), form.signs, stop)


def _defaults(folder: Path) -> SamplingParams:
    try:
        return read_defaults(folder)
    except (OSError, ValueError) as error:
        log.warning("%s: generation_config.json is ignored: %s", folder, error)
        return SamplingParams(temperature=1.0)
