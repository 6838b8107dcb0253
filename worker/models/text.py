"""A text model: what `worker.contract` asks for, built around a network that upstream has loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters
from msgspec.structs import replace

from protocol.logs import tame
from worker.contract import Draw, Facts, Model, ModelError, Pipeline, Prepared, Preparer
from worker.drafts import Drafter
from worker.engine.caches.trial import Abilities
from worker.engine.engine import BatchEngine
from worker.engine.heads import Heads
from worker.engine.sampling.sampler import Agree
from worker.models.config import ModelConfig
from worker.models.draw import read_defaults
from worker.models.eyes import Eyes
from worker.models.format import CallFormat, Format
from worker.models.holding import Held
from worker.models.prompt import PromptRules, TextPreparer
from worker.models.seeing import SeeingPreparer
from worker.models.template import probe
from worker.models.tokenizers import Tokenizers
from worker.output.calls.ids import namer_of
from worker.output.calls.writer import Calls
from worker.output.channels import ChannelPipeline
from worker.output.text import TextPipeline, Vocabulary

log = logging.getLogger(__name__)


def build_text_model(
    name: str,
    folder: Path,
    config: ModelConfig,
    network: nn.Module,
    eyes: Eyes | None = None,
    drafter: Drafter | None = None,
    *,
    abilities: Abilities | None = None,
    tokenizers: Tokenizers | None = None,
    agree: Agree | None = None,
) -> Model:
    """`network`: called as `network(tokens, cache=…)`, a `VisionNetwork` where there are `eyes`. `drafter`:
    guesses what it says next. `abilities`: what its rows can do, if that is known. `tokenizers`: some that
    are open. `agree`: see `Sampler`. Raises `ModelError` without a tokenizer."""
    tokenizers = tokenizers or Tokenizers(folder, config)
    tokenizer = _first(tokenizers, name, folder)
    defaults, size, held = _defaults(folder), config.vocabulary or len(tokenizer), Held()

    def open_preparer(context_length: int) -> Preparer:
        by_memory = context_length < config.context_length
        rules = PromptRules(context_length, size, defaults, by_memory=by_memory)
        tokenizer = tokenizers.take()
        return SeeingPreparer(tokenizer, rules, eyes, held) if eyes else TextPreparer(tokenizer, rules, held)

    ear = drafter if isinstance(drafter, Heads) else None
    engine = BatchEngine(network, abilities, drafter, ear, agree)
    for reason in engine.abilities.reasons:
        log.info("%s: %s", name, reason)
    seen = eyes.placeholders if eyes else {}
    facts = Facts(
        name=name,
        context_length=config.context_length,
        parameters=get_total_parameters(network),
        capabilities=replace(probe(tokenizer), images="image" in seen, videos="video" in seen),
        batched=engine.is_batchable,
    )
    return Model(facts, engine, open_preparer, Pipelines(tokenizer).open)


def _first(tokenizers: Tokenizers, name: str, folder: Path) -> TokenizerWrapper:
    # transformers brings a log handler when it is imported, and warns of every prompt beyond the context,
    # which we refuse ourselves.
    tame("transformers", logging.ERROR)
    try:
        return tokenizers.take()
    except Exception as error:  # nothing narrower: the tokenizers library raises Exception itself
        log.debug("%s: no tokenizer", name, exc_info=True)
        reason = " ".join(str(error).split())
        raise ModelError(f"{name}: its tokenizer in {folder} cannot be loaded ({reason}).") from None


class Pipelines:
    """What becomes of a model's tokens: text, or channels where there is anything to tell apart."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._vocabulary = Vocabulary(tokenizer._tokenizer)
        self._form = Format(tokenizer, self._vocabulary)
        self._call_form = CallFormat(tokenizer, self._vocabulary)

    def open(self, prepared: Prepared) -> Pipeline:
        """Of one request."""
        vocabulary, form, stop = self._vocabulary, self._form, prepared.stop
        if prepared.opening is not None and prepared.tools:
            single = prepared.single_call
            calls = Calls(prepared.tools, namer_of(prepared), single=single)
            reading = self._call_form.open(prepared.opening, calls)
            return ChannelPipeline(vocabulary, reading, self._call_form.signs, stop, single_call=single)
        if prepared.opening is None or form.is_plain:
            return TextPipeline(vocabulary, stop)
        return ChannelPipeline(vocabulary, form.open(prepared.opening), form.signs, stop)


def _defaults(folder: Path) -> Draw:
    try:
        return read_defaults(folder)
    except (OSError, ValueError) as error:
        log.warning("%s: generation_config.json is passed over: %s", folder, error)
        return Draw(temperature=1.0)
