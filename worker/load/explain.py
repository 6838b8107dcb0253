"""Messages about a load for the operator: errors and the summary line."""

from __future__ import annotations

import errno
import logging

from protocol.common.error_text import in_bytes
from protocol.tasks import Task
from worker.interfaces import ModelError
from worker.load.config import ModelConfig, in_mlx_lm
from worker.process.device_errors import raise_if_device_failed
from worker.values import ModelInfo

log = logging.getLogger(__name__)

_TRANSIENT = {
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT),
}
LINES_MAX = 5
"""Lines of an error that are shown; the first says how many names follow."""


def raise_if_transient(error: BaseException, name: str) -> None:
    """Raise an error that says nothing about the model, but of the device, or of the machine's memory, disk
    or number of files at this time. Others are its fault, and logged."""
    raise_if_device_failed(error)
    is_full = isinstance(error, OSError) and error.errno in _TRANSIENT
    if is_full or isinstance(error, MemoryError):
        raise error
    log.debug("%s: load failed", name, exc_info=error)


def explain(error: BaseException, config: ModelConfig) -> str:
    """Explain a failed load in one sentence for the operator."""
    library, architecture = "mlx-lm" if in_mlx_lm(config) else "mlx-vlm", repr(config.architecture)
    if isinstance(error, SystemExit | ImportError):
        return f"{library} needs a package for the architecture {architecture} that is not installed."
    text = str(error).strip() or type(error).__name__
    first_line, told = text.splitlines()[0], _first_lines(text)
    if isinstance(error, KeyError) and "." in text:
        return f"its weights have no tensor {text}. Download or convert the model again."
    if isinstance(error, KeyError):
        return f"its config.json has no {text}, or an unknown value beside it, which {library} needs."
    if "back-end" in first_line:
        return f"its layers are made for another device than this machine has ({first_line})."
    if "parameters" in text or "shape" in text.lower():
        return f"its weights do not fit its config.json ({told}). Download or convert the model again."
    if isinstance(error, RuntimeError | OSError):
        return f"its weights cannot be loaded ({first_line}). Download the model again."
    return f"{library} cannot build the architecture {architecture} from its config.json ({first_line})."


def _first_lines(text: str) -> str:
    """Return the first lines as one; upstream lists names, one a line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:LINES_MAX]) + (" …" if len(lines) > LINES_MAX else "")


def explain_missing_images(error: BaseException) -> str:
    """Explain in one sentence why a vision model is served without images."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ModelError):
        return text
    return f"mlx-vlm cannot be used for it ({text.splitlines()[0]})."


def describe(facts: ModelInfo, config: ModelConfig, task: Task, weight_bytes: int) -> str:
    """Summarize a loaded model in one line for the log."""
    batching = "" if facts.batched else ", requests not batched"
    generating = "vision" if facts.capabilities.images else "text"
    kind = {"generate": generating, "embed": "embedding", "rerank": "reranking"}[task]
    return (
        f"loaded {facts.name}: {kind} model, {config.architecture}, "
        f"{_short(facts.parameters)} parameters, {in_bytes(weight_bytes)}, "
        f"{in_bytes(facts.cache_bytes_max or 0)} left for caches, "
        f"context {facts.context_length}{batching}"
    )


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
