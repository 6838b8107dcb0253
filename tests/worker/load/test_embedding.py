"""Embedding and rerank models match mlx-vlm's own server, however their texts are batched."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from protocol.conversation import pack
from protocol.messages import Embed, Rank
from tests.models.corpus import make_corpus
from tests.models.encoders import EMBEDDERS, ENCODERS, RANKERS
from tests.models.fixtures import model_folder
from tests.worker.folders import nothing
from tests.worker.upstream import embedded, ranked
from worker.interfaces import EmbeddingModel
from worker.load.load import ModelLoader
from worker.values import PreparedTexts

TOLERANCE = 1e-5
QUERY = "where does the river turn to the old station?"


@cache
def loaded(name: str) -> EmbeddingModel:
    model = ModelLoader(str(model_folder(name))).load(nothing)
    assert isinstance(model, EmbeddingModel)
    return model


def texts_of(count: int, seed: int = 0, words_max: int = 45) -> list[str]:
    """Return texts of very unequal lengths in several scripts."""
    words = " ".join(make_corpus(300, seed)).split()
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=rng.randint(1, words_max))) for _ in range(count)]


def asked(name: str, texts: Sequence[str], **more: object) -> Embed | Rank:
    fields = {"incarnation": "g", "id": "a", "texts": pack(list(texts)), "count": len(texts), **more}
    return Rank(query=QUERY, source="documents", **fields) if name in RANKERS else Embed(**fields)  # type: ignore[arg-type]


def engine_request(name: str, texts: Sequence[str], **more: object) -> PreparedTexts:
    return loaded(name).open_preparer().prepare(asked(name, texts, **more), ())


def run(name: str, texts: PreparedTexts, *, alone: bool) -> np.ndarray:
    encoder = loaded(name).encoder
    batches = [[text] for text in texts.texts] if alone else [texts.texts]
    vectors = [vector for batch in batches for vector in encoder.encode(batch)]
    return np.array([np.frombuffer(vector, dtype="<f4") for vector in vectors])


@pytest.mark.parametrize("name", ENCODERS)
def test_results_are_upstreams_alone_and_among_others_of_unequal_length(name: str) -> None:
    texts = texts_of(16, seed=1)
    expected, tokens = ranked(name, QUERY, texts) if name in RANKERS else embedded(name, texts)
    # Texts are truncated as upstream truncates them.
    known = engine_request(name, texts, **({} if name in RANKERS else {"tokens_max": 2**31 - 1}))
    assert known.tokens == tokens
    assert len({len(text.tokens) for text in known.texts}) > 8
    for alone in (True, False):
        found = run(name, known, alone=alone)
        if name in RANKERS:
            assert found.shape == (16, 1)
            found = found[:, 0]
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE
    # Texts are distinguished.
    assert np.ptp(expected, axis=0).max() > (0.05 if name in RANKERS else 0.1)


def test_a_judge_is_told_what_makes_a_document_relevant() -> None:
    documents = texts_of(4, seed=2)
    instruction = "Find the station."
    expected, tokens = ranked("qwen3-reranker", QUERY, documents, instruction)
    known = engine_request("qwen3-reranker", documents, instruction=instruction)
    assert known.tokens == tokens
    assert np.abs(run("qwen3-reranker", known, alone=False)[:, 0] - expected).max() < TOLERANCE
    assert np.abs(expected - ranked("qwen3-reranker", QUERY, documents)[0]).max() > TOLERANCE


@pytest.mark.parametrize("name", ENCODERS)
def test_a_folder_says_what_it_is_made_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = ModelLoader(str(model_folder(name))).load(nothing)
    assert isinstance(model, EmbeddingModel)
    able = model.info.capabilities
    assert (able.generation, able.embeddings, able.rerank) == (False, name in EMBEDDERS, name in RANKERS)
    assert model.info.batched
    assert model.info.parameters > 10_000
    assert model.info.identity
    kind = "embedding" if name in EMBEDDERS else "reranking"
    assert any(line.startswith(f"loaded {name}: {kind} model") for line in caplog.messages)


def test_the_context_is_that_of_positions_and_tokenizer() -> None:
    lengths = {name: loaded(name).info.context_length for name in EMBEDDERS}
    assert lengths["bert-embedder"] == lengths["roberta-embedder"] == 128
    assert lengths["qwen3-embedder"] == 512
    stated = json.loads((model_folder("roberta-embedder") / "config.json").read_text())
    assert stated["max_position_embeddings"] == 130
