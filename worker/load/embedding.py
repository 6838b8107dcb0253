"""Embedding and reranking models: an `EmbeddingModel` built around an mlx-vlm network."""

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

from protocol.common.logs import quiet_libraries
from protocol.task_detection import is_classifier
from protocol.tasks import Task
from protocol.types import Capabilities
from worker.input.texts import EmbedPreparer, JudgePreparer, PairPreparer, TextRules, Tokenizer
from worker.interfaces import EmbeddingModel, ModelError, TextsPreparer
from worker.load import memory
from worker.load.config import ModelConfig
from worker.runner.encoder import BatchEncoder, Forward
from worker.values import ModelInfo

TEXT_TOKENS_MAX = 8192
"""Maximum length of one text, as in mlx-vlm's server: a text is one pass, and masks grow quadratically."""

log = logging.getLogger(__name__)


def load_network(folder: Path, config: ModelConfig, task: Task) -> nn.Module:
    """Open upstream's network without evaluating its weights. Raises whatever upstream raises."""
    if task == "embed":
        network = load_embedding_model(folder, lazy=True)
        network.pooling_config = read_pooling_config(folder)
        return network
    load = load_sequence_classification_model if is_classifier(config.architectures) else load_model
    return load(folder, lazy=True)


def build_encoding_model(
    name: str, folder: Path, config: ModelConfig, task: Task, network: nn.Module
) -> EmbeddingModel:
    """Build the model. `network`: from `load_network`. Raises `ModelError` without a tokenizer."""
    # A list of texts would be tokenized on all cores, and other processes would have to wait.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It warns about every text longer than the context, which this server refuses itself.
    quiet_libraries("transformers", logging.ERROR)
    tokenizer = _open_tokenizer(name, folder)
    forward, kind = _roles(name, config, task, network, tokenizer)
    encoder = BatchEncoder(forward, padding=tokenizer.pad_token_id or 0)
    if not encoder.is_paddable:
        log.warning("%s: padding changes its results, so only texts of equal length are batched", name)
    stated = json.loads((folder / "config.json").read_bytes())
    rules = TextRules(
        context_length=_context_length(config, stated, tokenizer),
        vocabulary=config.vocabulary or len(tokenizer),
        width=encoder.width,
        shorter_sizes=_shortened(config, stated),
    )
    facts = ModelInfo(
        name=name,
        context_length=rules.context_length,
        parameters=get_total_parameters(network),
        capabilities=Capabilities(generation=False, embeddings=task == "embed", rerank=task == "rerank"),
        batched=encoder.is_paddable,
    )

    def open_preparer() -> TextsPreparer:
        preparer: TextsPreparer = kind(_open_tokenizer(name, folder), rules)
        return preparer

    return EmbeddingModel(facts, encoder, open_preparer, memory.release)


def _open_tokenizer(name: str, folder: Path) -> Tokenizer:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{name}: its tokenizer in {folder} cannot be loaded ({reason}).") from None


def _roles(
    name: str, config: ModelConfig, task: Task, network: Any, tokenizer: Tokenizer
) -> tuple[Forward, Callable[[Tokenizer, TextRules], Any]]:
    """Return how the network is run, and the class that prepares its texts."""
    if task == "embed":
        return partial(_embed, network), EmbedPreparer
    if is_classifier(config.architectures):
        return partial(_classify, network), PairPreparer
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: it has no chat template, which reranking with a decoder needs.")
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
    """Return the probability of "yes" against "no" as next token, [rows, 1]. Attention is causal, so padding
    on the right needs no mask."""
    hidden = network.model(tokens)
    last = hidden[mx.arange(tokens.shape[0]), mask.sum(axis=1) - 1]
    tied = not hasattr(network, "lm_head")
    logits = network.model.embed_tokens.as_linear(last) if tied else network.lm_head(last)
    return mx.sigmoid(logits[:, yes] - logits[:, no])[:, None]


def _token(name: str, tokenizer: Tokenizer, word: str) -> int:
    tokens = tokenizer.encode(word, add_special_tokens=False)
    if len(tokens) != 1:
        raise ModelError(
            f"{name}: its tokenizer has no single token {word!r}, which its relevance score needs."
        )
    return int(tokens[0])


def _context_length(config: ModelConfig, stated: dict[str, Any], tokenizer: Tokenizer) -> int:
    """Return the maximum length of one text. XLM-RoBERTa's positions start after its padding token's."""
    positions = config.context_length
    if config.architecture == "xlm-roberta":
        positions -= 1 + int(stated.get("pad_token_id", 1))
    limits = (positions, TEXT_TOKENS_MAX, getattr(tokenizer, "model_max_length", None))
    return min(limit for limit in limits if isinstance(limit, int) and limit > 0)


def _shortened(config: ModelConfig, stated: dict[str, Any]) -> frozenset[int] | None:
    """Return the shorter dimensions of Matryoshka embeddings; None: any; empty: none."""
    if told := stated.get("matryoshka_dimensions"):
        return frozenset(int(length) for length in told)
    # Embedding models of these families are Matryoshka models, but their configs do not say so.
    is_trained_so = config.architecture in ("gemma3_text", "qwen3")
    return None if stated.get("is_matryoshka", is_trained_so) else frozenset()
