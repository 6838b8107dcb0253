"""`python -m worker.exactness FLAGS`: measure a model for `roundhouse doctor` and print JSON. The flags are
those of a worker."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

import msgspec

from protocol.common import logs
from protocol.common.state_folder import state_folder
from protocol.settings import reader as settings
from protocol.settings.worker import WorkerSettings
from protocol.types import ContextFit, ModelReport
from worker.interfaces import EmbeddingModel, InsufficientMemoryError, Model, ModelError
from worker.process import environment
from worker.process.preload import preload_openblas


def main() -> int:
    """Print what was measured as JSON. Return the exit status: 1 with a sentence on stderr if it cannot be
    loaded."""
    configured = settings.read_or_exit(
        WorkerSettings, "worker", sys.argv[1:], os.environ, program="worker", about=""
    )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logs.setup("exactness", "text", "error")
    preload_openblas(sys.argv)
    environment.import_upstream()
    environment.protect_kernels()
    try:
        loaded = _load(configured)
    except (ModelError, InsufficientMemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    found = loaded.info.exactness if isinstance(loaded, Model) else None
    if found is None:
        print("only models that generate text can be measured.", file=sys.stderr)
        return 1
    assert isinstance(loaded, Model), "it has been measured"
    report = ModelReport(
        exactness=found, context=_context(configured, loaded), capabilities=loaded.info.capabilities
    )
    print(msgspec.json.encode(report).decode())
    return 0


def _load(configured: WorkerSettings) -> Model | EmbeddingModel:
    """Load the model as a worker does, without drafts and adapters. Raises as a loader."""
    from worker.load.load import ModelLoader
    from worker.load.options import LoadOptions

    options = replace(
        LoadOptions.of(configured),
        draft_model=None,
        speculation="off",
        adapters=(),
        exactness="measure",
        exactness_folder=state_folder(os.environ) / "exactness",
    )
    return ModelLoader(configured.model or None, options).load(lambda done, total: None)


def _context(configured: WorkerSettings, model: Model) -> ContextFit | None:
    """Return how many tokens fit, as a worker tells it."""
    from worker.gateway.model_thread import policy_of, ready_of, reservations_of

    policy = policy_of(configured, model)
    ready = ready_of("doctor", model.info, policy)
    if ready.cache_bytes_max is None:
        return None
    return ContextFit(
        context_length=model.info.context_length,
        tokens=ready.context_length,
        tokens_max=ready.tokens_max,
        row_bytes=reservations_of(policy).needs(ready.context_length),
        cache_bytes=ready.cache_bytes_max,
    )


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as in `worker.__main__`
