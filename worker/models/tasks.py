"""Detect a model's task: generate text, embed texts, or rank documents.

Encoders are recognized by their architecture. Decoders made for embedding or ranking have the architecture of
generating ones; they are recognized by files of sentence-transformers or, since conversions often omit those,
by the model's name. `--task` overrides the detection.
"""

from __future__ import annotations

import logging
from pathlib import Path

from protocol.tasks import Task
from worker.contract.engine import ModelError
from worker.models.config import ENCODERS, ModelConfig

log = logging.getLogger(__name__)

EMBEDDING_DECODERS = frozenset({"gemma3_text", "lfm2", "ministral3", "qwen3"})
RANKING_DECODERS = frozenset({"qwen3"})

_CLASSIFIER = "ForSequenceClassification"
_VERBS: dict[Task, str] = {"generate": "generate text", "embed": "embed texts", "rerank": "rank documents"}


def find_task(folder: Path, config: ModelConfig, name: str, asked: Task | None) -> Task:
    """Return the task. `name`: the model's original name. `requested`: overrides the detection.

    Raises `ModelError` if the model cannot do the requested task.
    """
    able = _able(config)
    if asked is None:
        told = _told(folder, name)
        if told and told not in able:
            log.warning("%s: seems to be made to %s, which is not supported", name, _VERBS[told])
        return told if told in able else able[0]
    if asked not in able:
        message = f"{name}: a model of the architecture {config.architecture!r} cannot {_VERBS[asked]} here."
        raise ModelError(message)
    return asked


def is_classifier(config: ModelConfig) -> bool:
    """Return whether it is a sequence classifier."""
    return any(each.endswith(_CLASSIFIER) for each in config.architectures)


def _able(config: ModelConfig) -> list[Task]:
    """Return the tasks that its architecture supports, the default first."""
    if config.architecture in ENCODERS:
        return ["rerank"] if is_classifier(config) else ["embed"]
    able: list[Task] = ["generate"]
    able += ["embed"] if config.architecture in EMBEDDING_DECODERS else []
    return able + (["rerank"] if config.architecture in RANKING_DECODERS else [])


def _told(folder: Path, name: str) -> Task | None:
    own_name = name.rsplit("/", 1)[-1].lower()
    if "rerank" in own_name:
        return "rerank"
    return "embed" if "embed" in own_name or any(folder.glob("*_Pooling/config.json")) else None
