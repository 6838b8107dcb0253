"""A model that answers texts with numbers: what `worker.contract` asks for, around upstream's network."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import get_total_parameters
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.models.pooling import read_pooling_config
from mlx_vlm.reranker_loader import load_sequence_classification_model
from mlx_vlm.utils import load_model
from transformers import AutoTokenizer

from protocol.logs import tame
from protocol.parts import Capabilities
from protocol.tasks import Task
from worker.contract import EncodingModel, Facts, ModelError
from worker.engine.encoder import BatchEncoder, Forward
from worker.models.config import ModelConfig
from worker.models.tasks import is_classifier
from worker.models.texts import EmbedPreparer, JudgePreparer, PairPreparer, TextRules, Tokenizer
from worker.texts import TextsPreparer

TEXT_TOKENS_MAX = 8192
"""Of one text, which is run in one piece, with masks of its length squared. As mlx-vlm's server."""

log = logging.getLogger(__name__)


def load_network(folder: Path, config: ModelConfig, task: Task) -> nn.Module:
    """Upstream's network, its weights not evaluated yet. Raises one of many errors."""
    if task == "embed":
        network = load_embedding_model(folder, lazy=True)
        network.pooling_config = read_pooling_config(folder)
        return network
    load = load_sequence_classification_model if is_classifier(config) else load_model
    return load(folder, lazy=True)


def build_encoding_model(
    name: str, folder: Path, config: ModelConfig, task: Task, network: nn.Module
) -> EncodingModel:
    """`network`: as `load_network` gives it. Raises `ModelError` without a tokenizer."""
    # A list would be tokenized on all cores at once, and others on this machine would wait for them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It warns of every text beyond the context, which we refuse ourselves.
    tame("transformers", logging.ERROR)
    tokenizer = _open_tokenizer(name, folder)
    forward, kind = _roles(name, config, task, network, tokenizer)
    encoder = BatchEncoder(forward, padding=tokenizer.pad_token_id or 0)
    if not encoder.is_paddable:
        log.warning("%s: sees padding, so only texts of equal length are run together", name)
    stated = json.loads((folder / "config.json").read_bytes())
    rules = TextRules(
        context_length=_context_length(config, stated, tokenizer),
        vocabulary=config.vocabulary or len(tokenizer),
        width=encoder.width,
        shortened=_shortened(config, stated),
    )
    facts = Facts(
        name=name,
        context_length=rules.context_length,
        parameters=get_total_parameters(network),
        capabilities=Capabilities(generation=False, embeddings=task == "embed", rerank=task == "rerank"),
        batched=encoder.is_paddable,
    )

    def open_preparer() -> TextsPreparer:
        preparer: TextsPreparer = kind(_open_tokenizer(name, folder), rules)
        return preparer

    return EncodingModel(facts, encoder, open_preparer)


def _open_tokenizer(name: str, folder: Path) -> Tokenizer:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{name}: its tokenizer in {folder} cannot be loaded ({reason}).") from None


def _roles(
    name: str, config: ModelConfig, task: Task, network: Any, tokenizer: Tokenizer
) -> tuple[Forward, Callable[[Tokenizer, TextRules], Any]]:
    """How the network is run, and who prepares its texts."""
    if task == "embed":
        return partial(_embed, network), EmbedPreparer
    if is_classifier(config):
        return partial(_classify, network), PairPreparer
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: it has no chat template to ask it with how relevant a document is.")
    yes, no = (_token(name, tokenizer, word) for word in ("yes", "no"))
    return partial(_judge, network.language_model, yes, no), JudgePreparer


def _embed(network: Any, tokens: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
    vectors: mx.array = network(tokens, attention_mask=mask).text_embeds
    return vectors


def _classify(network: Any, tokens: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
    return mx.sigmoid(network(tokens, attention_mask=mask, token_type_ids=types).logits)


def _judge(
    network: Any, yes: int, no: int, tokens: mx.array, mask: mx.array, types: mx.array | None
) -> mx.array:
    """How much likelier a yes is than a no. What stands to the right of a token it does not see, so padding
    needs no mask."""
    hidden = network.model(tokens)
    last = hidden[mx.arange(tokens.shape[0]), mask.sum(axis=1) - 1]
    tied = not hasattr(network, "lm_head")
    logits = network.model.embed_tokens.as_linear(last) if tied else network.lm_head(last)
    return mx.sigmoid(logits[:, yes] - logits[:, no])[:, None]


def _token(name: str, tokenizer: Tokenizer, word: str) -> int:
    tokens = tokenizer.encode(word, add_special_tokens=False)
    if len(tokens) != 1:
        raise ModelError(f"{name}: its tokenizer has no token {word!r}, which its judgement would be.")
    return int(tokens[0])


def _context_length(config: ModelConfig, stated: dict[str, Any], tokenizer: Tokenizer) -> int:
    """Of one text. XLM-RoBERTa counts positions from behind its padding token."""
    positions = config.context_length
    if config.architecture == "xlm-roberta":
        positions -= 1 + int(stated.get("pad_token_id", 1))
    limits = (positions, TEXT_TOKENS_MAX, getattr(tokenizer, "model_max_length", None))
    return min(limit for limit in limits if isinstance(limit, int) and limit > 0)


def _shortened(config: ModelConfig, stated: dict[str, Any]) -> frozenset[int] | None:
    """Which beginnings of a vector are vectors themselves, as Matryoshka training makes them."""
    if told := stated.get("matryoshka_dimensions"):
        return frozenset(int(length) for length in told)
    # The embedding models of both families were trained so, and do not say it.
    is_trained_so = config.architecture in ("gemma3_text", "qwen3")
    return None if stated.get("is_matryoshka", is_trained_so) else frozenset()
