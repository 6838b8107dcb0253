"""`python -m worker`: one model in one process."""

from __future__ import annotations

import logging
import os
import sys

from protocol import lifeline, logs, settings, sockets
from protocol.workersettings import WorkerSettings
from worker import spare
from worker.config import cache_folder
from worker.laps import Laps
from worker.preload import preload_openblas

IMPORTS = (
    "worker.line.service",
    "worker.models.load",
    "worker.models.text",
    "worker.models.trials",
    "worker.models.vision",
    "worker.models.encoding",
)
"""All that is imported for any model, but its own architecture."""


def main() -> int:
    """Load the model and serve the gateway until told to stop. The exit status."""
    words = spare.words(IMPORTS, _look_ahead)
    laps = Laps()
    configured = settings.read_or_exit(
        WorkerSettings,
        "worker",
        words,
        os.environ,
        program="roundhouse worker",
        about="Own one model and serve the gateway that asks for it.",
    )
    logs.setup("worker", configured.log_format, configured.log_level)
    # May replace this process by itself, so it comes before the lifeline is taken up and MLX is imported.
    preload_openblas(sys.argv)
    lifeline.follow_parent()
    from worker.line.service import Service
    from worker.models.load import ModelLoader

    loader = ModelLoader(
        configured.model or None,
        served_name=configured.served_name,
        memory_headroom=configured.memory_headroom,
        memory_limit_bytes=configured.memory_limit_bytes,
        memory_budget=configured.memory_budget,
        task=configured.task,
        text_only=configured.text_only,
        draft_model=configured.draft_model,
        uses_heads=configured.speculation == "auto",
        trials=cache_folder(os.environ, sys.platform) / "trials",
        laps=laps,
    )
    try:
        service = Service(loader, configured, loader.device_memory, laps)
    except sockets.EndpointError as error:
        settings.exit_with("worker", error)
    return service.run()


def _look_ahead() -> None:
    from worker.models.beforehand import look_ahead

    look_ahead()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # Not SystemExit: MLX's threads abort in the interpreter's teardown, and one in the middle of a forward
    # pass would be waited for. Nothing is left to save at this point.
    os._exit(status)
