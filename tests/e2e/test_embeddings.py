"""Embeddings and reranking over HTTP: OpenAI's SDK against mlx-vlm's own pipeline, and refusals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.models.fixtures import model_folder
from tests.system import System, running_system
from tests.worker.upstream import embedded, ranked

TOLERANCE = 1e-5
EMBEDDER, RERANKER = "qwen3-embedder", "qwen3-reranker"
"""Those of other families are in `tests/worker/load/test_embedding.py`."""
TEXTS = ["駅はどこ? 🚂", "The turntable turns.", "a", "the old house near the river " * 8]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("embeddings")) as system:
        for name in (EMBEDDER, RERANKER):
            system.start_worker("--model", str(model_folder(name)), module="worker")
        system.wait_loaded(2, within_s=300)
        yield system


@pytest.mark.parametrize("form", ["float", "base64"])
def test_the_sdk_gets_upstreams_vectors(client: openai.OpenAI, form: Any) -> None:
    answer = client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format=form)
    expected, tokens = embedded(EMBEDDER, TEXTS)
    found: list[Any] = [entry.embedding for entry in answer.data]
    if form == "base64":  # if requested explicitly, the SDK does not decode it
        found = [np.frombuffer(base64.b64decode(vector), dtype="<f4") for vector in found]
    assert np.abs(np.array(found) - expected).max() < TOLERANCE
    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    assert (answer.model, answer.object) == (EMBEDDER, "list")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_a_text_alone_and_its_ids_have_its_vector_which_can_be_had_shorter(client: openai.OpenAI) -> None:
    expected = embedded(EMBEDDER, TEXTS[:1])[0][0]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model_folder(EMBEDDER))(TEXTS[0])["input_ids"]
    for given in (TEXTS[0], ids, [ids]):
        [entry] = client.embeddings.create(model=EMBEDDER, input=given).data
        assert np.abs(np.array(entry.embedding) - expected).max() < TOLERANCE
    [entry] = client.embeddings.create(model=EMBEDDER, input=ids, dimensions=8).data
    shorter = expected[:8] / np.linalg.norm(expected[:8])
    assert np.abs(np.array(entry.embedding) - shorter).max() < TOLERANCE


def test_documents_are_ranked_as_upstream_does(system: System) -> None:
    body = {"model": RERANKER, "query": "where is the river?", "documents": TEXTS, "return_documents": True}
    answer = system.http.post("/v1/rerank", json=body).raise_for_status().json()
    expected, tokens = ranked(RERANKER, "where is the river?", TEXTS)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert np.abs(np.array([scores[place] for place in range(4)]) - expected).max() < TOLERANCE
    told = [result["relevance_score"] for result in answer["results"]]
    assert told == sorted(told, reverse=True)
    assert all(result["document"]["text"] == TEXTS[result["index"]] for result in answer["results"])
    assert answer["usage"]["total_tokens"] == tokens
    few = system.http.post("/rerank", json=body | {"top_n": 1}).json()["results"]
    assert [result["index"] for result in few] == [answer["results"][0]["index"]]
