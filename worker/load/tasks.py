"""The task of a loaded model, detected (`protocol.task_detection`) or chosen by `--task`."""

from __future__ import annotations

import logging
from pathlib import Path

from protocol.task_detection import suggested_task, supported_tasks
from protocol.tasks import Task
from worker.interfaces import ModelError
from worker.load.config import ModelConfig

log = logging.getLogger(__name__)

_VERBS: dict[Task, str] = {"generate": "generate text", "embed": "embed texts", "rerank": "rank documents"}


def find_task(folder: Path, config: ModelConfig, name: str, asked: Task | None) -> Task:
    """Return the task. `name`: the model's original name. `asked`: overrides the detection.

    Raises `ModelError` if the model cannot do that task.
    """
    able = supported_tasks(config.architecture, config.architectures)
    if asked is None:
        told = suggested_task(folder, name)
        if told and told not in able:
            log.warning("%s: seems to be made to %s, which is not supported", name, _VERBS[told])
        return told if told in able else able[0]
    if asked not in able:
        message = f"{name}: a model of the architecture {config.architecture!r} cannot {_VERBS[asked]} here."
        raise ModelError(message)
    return asked
