"""Detection of the task that a model is made for, from its config and its name, without loading it.

Encoders are recognized by their architecture. Decoders made for embedding or ranking have the architecture of
generating ones; they are recognized by files of sentence-transformers or, since conversions often omit those,
by the model's name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from protocol.common.model_folder import CONFIG
from protocol.tasks import Task

ENCODERS = frozenset({"bert", "modernbert", "xlm-roberta"})
"""Encoder-only architectures, which mlx-vlm implements."""
EMBEDDING_DECODERS = frozenset({"gemma3_text", "lfm2", "ministral3", "qwen3"})
RANKING_DECODERS = frozenset({"qwen3"})

_CLASSIFIER = "ForSequenceClassification"


def is_classifier(classes: Sequence[str]) -> bool:
    """Return whether a model with these classes of transformers is a sequence classifier."""
    return any(each.endswith(_CLASSIFIER) for each in classes)


def supported_tasks(architecture: str, classes: Sequence[str]) -> list[Task]:
    """Return the tasks that an architecture supports, the default first."""
    if architecture in ENCODERS:
        return ["rerank"] if is_classifier(classes) else ["embed"]
    supported: list[Task] = ["generate"]
    supported += ["embed"] if architecture in EMBEDDING_DECODERS else []
    return supported + (["rerank"] if architecture in RANKING_DECODERS else [])


def suggested_task(folder: Path, name: str) -> Task | None:
    """Return the task that the files and the name of a model suggest, whether or not it is supported."""
    own_name = name.rsplit("/", 1)[-1].lower()
    if "rerank" in own_name:
        return "rerank"
    return "embed" if "embed" in own_name or any(folder.glob("*_Pooling/config.json")) else None


def detect_task(folder: Path, name: str) -> Task | None:
    """Return the task of a model whose worker has not been started yet; None if its config is unreadable."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        supported = supported_tasks(str(config["model_type"]), [*map(str, config.get("architectures") or ())])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # its worker will say what is wrong
        return None
    suggested = suggested_task(folder, name)
    return suggested if suggested in supported else supported[0]
