"""What models are made for: each for one thing, and what is said of any other."""

from __future__ import annotations

from typing import Literal

from protocol.errors import Code, RequestError
from protocol.messages import Embed, Generate, Rank, Request
from protocol.parts import Capabilities

Task = Literal["generate", "embed", "rerank"]

_REFUSALS: dict[Task, str] = {
    "generate": "does not generate text.",
    "embed": "makes no embeddings.",
    "rerank": "does not rank documents.",
}
_MADE_FOR: dict[Task, str] = {
    "generate": "It generates text (/v1/chat/completions); ask a model that is made for this.",
    "embed": "It makes embeddings: ask it at /v1/embeddings.",
    "rerank": "It ranks documents: ask it at /v1/rerank.",
}


def task_of(request: Request) -> Task:
    """What a request asks for."""
    match request:
        case Embed():
            return "embed"
        case Rank():
            return "rerank"
        case _:
            return "generate"


def runs_nothing(request: Request) -> bool:
    """Whether its prompt is only counted or taken apart, which the model never hears of."""
    return isinstance(request, Generate) and request.tokenizing is not None


def tasks(able: Capabilities) -> list[Task]:
    """What can be asked for."""
    flags: dict[Task, bool] = {
        "generate": able.generation,
        "embed": able.embeddings,
        "rerank": able.rerank,
    }
    return [task for task, is_served in flags.items() if is_served]


def require(task: Task, able: Capabilities, model: str) -> None:
    """Raises `RequestError(invalid_request)` for what this model is not made for."""
    served = tasks(able)
    if task not in served:
        message = " ".join([f"The model `{model}` {_REFUSALS[task]}", *(_MADE_FOR[of] for of in served)])
        raise RequestError(Code.INVALID_REQUEST, message, param="model")
