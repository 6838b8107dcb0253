"""Detection of the task for which a model folder is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.task_detection import detect_task
from protocol.tasks import Task
from worker.interfaces import ModelError
from worker.load.config import ModelConfig, find_task


def config(architecture: str, *classes: str) -> ModelConfig:
    return ModelConfig("text", architecture, 512, 100, (), classes)


TOLD: dict[str, tuple[ModelConfig, str, Task]] = {
    "an encoder": (config("bert", "BertModel"), "org/anything", "embed"),
    "a classifier": (config("xlm-roberta", "XLMRobertaForSequenceClassification"), "a", "rerank"),
    "a decoder by name": (config("qwen3"), "mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ", "embed"),
    "a ranking one": (config("qwen3"), "Qwen/Qwen3-Reranker-0.6B", "rerank"),
    "Gemma's": (config("gemma3_text"), "google/embeddinggemma-300m", "embed"),
    "a folder of a maker of embeddings": (config("qwen3"), "embeddings/Qwen3-0.6B", "generate"),
    "one that can only generate": (config("llama"), "org/an-embedding", "generate"),
}


@pytest.mark.parametrize(("found", "name", "task"), TOLD.values(), ids=TOLD)
def test_task_is_of_architecture_and_name(tmp_path: Path, found: ModelConfig, name: str, task: Task) -> None:
    assert find_task(tmp_path, found, name, None) == task
    config = {"model_type": found.architecture, "architectures": found.architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert detect_task(tmp_path, name) == task


def test_files_of_sentence_transformers_make_a_decoder_embed(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    assert find_task(tmp_path, config("qwen3"), "org/model", None) == "embed"
    assert find_task(tmp_path, config("llama"), "org/model", None) == "generate"


def test_explicit_task_is_used_where_the_model_supports_it(tmp_path: Path) -> None:
    assert find_task(tmp_path, config("qwen3"), "Qwen3-Embedding-0.6B", "generate") == "generate"
    assert find_task(tmp_path, config("qwen3"), "Qwen3-0.6B", "rerank") == "rerank"
    with pytest.raises(ModelError, match="'llama' cannot embed texts here"):
        find_task(tmp_path, config("llama"), "a", "embed")
    with pytest.raises(ModelError, match="'bert' cannot rank documents here"):
        find_task(tmp_path, config("bert", "BertModel"), "a", "rerank")
