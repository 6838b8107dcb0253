"""Vectors and scores of mlx-vlm's own server: its loaders, its tokenization, its scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.models.pooling import read_pooling_config
from mlx_vlm.reranker_loader import load_reranker
from mlx_vlm.server.embeddings import _embed
from mlx_vlm.server.reranking import RerankItem, score_documents
from mlx_vlm.utils import load_processor

from tests.models.fixtures import model_folder


@cache
def _embedder(name: str) -> tuple[Any, Any]:
    folder = model_folder(name)
    network = load_embedding_model(folder)
    network.pooling_config = read_pooling_config(folder)
    return network, load_processor(folder, add_detokenizer=False)


@cache
def _reranker(name: str) -> tuple[Any, Any]:
    return load_reranker(model_folder(name))


def embedded(name: str, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """Return the vectors [texts, dimensions] of all texts in one batch, and their number of tokens."""
    vectors, tokens = _embed(*_embedder(name), list(texts))
    return np.array(vectors), tokens


def ranked(
    name: str, query: str, documents: Sequence[str], instruction: str | None = None
) -> tuple[np.ndarray, int]:
    """Return the scores [documents], and the number of tokens read."""
    network, processor = _reranker(name)
    scores, tokens = score_documents(
        network,
        processor,
        network.config,
        RerankItem(text=query),
        [RerankItem(text=document) for document in documents],
        instruction,
    )
    return np.array(scores), tokens
