"""Tasks of models: generation, embeddings or reranking; and the error for a task that a model lacks."""

from __future__ import annotations

from typing import Literal

from protocol.errors import Code, RequestError
from protocol.messages import Embed, Generate, Rank, Request
from protocol.types import Capabilities

Task = Literal["generate", "embed", "rerank"]

_REFUSALS: dict[Task, str] = {
    "generate": "does not generate text.",
    "embed": "does not compute embeddings.",
    "rerank": "does not rank documents.",
}
_MADE_FOR: dict[Task, str] = {
    "generate": "It generates text (/v1/chat/completions); use another model for this task.",
    "embed": "It is an embedding model: use /v1/embeddings.",
    "rerank": "It is a reranker: use /v1/rerank.",
}


def task_of(request: Request) -> Task:
    """Return the task of a request."""
    match request:
        case Embed():
            return "embed"
        case Rank():
            return "rerank"
        case _:
            return "generate"


def runs_nothing(request: Request) -> bool:
    """Return whether the request is tokenize-only, without work for the model thread."""
    return isinstance(request, Generate) and request.tokenizing is not None


def tasks(able: Capabilities) -> list[Task]:
    """Return the tasks that a model supports."""
    flags: dict[Task, bool] = {
        "generate": able.generation,
        "embed": able.embeddings,
        "rerank": able.rerank,
    }
    return [task for task, is_served in flags.items() if is_served]


def require(task: Task, able: Capabilities, model: str) -> None:
    """Raise `RequestError(invalid_request)` if the model does not support `task`."""
    served = tasks(able)
    if task not in served:
        message = " ".join([f"The model `{model}` {_REFUSALS[task]}", *(_MADE_FOR[of] for of in served)])
        raise RequestError(Code.INVALID_REQUEST, message, param="model")
