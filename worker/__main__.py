"""`python -m worker`: one model in one process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from protocol import lifeline, logs, settings, sockets
from protocol.hosts import HostsError
from protocol.parts import Resources
from protocol.workersettings import WorkerSettings
from worker import spare
from worker.config import cache_folder, of_set
from worker.contract import Loader, ModelError, NoRoomError
from worker.laps import Laps
from worker.preload import preload_openblas
from worker.ranks import place

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
    try:
        here = place.find(os.environ)
    except HostsError as error:
        settings.exit_with("worker", str(error))
    name = "worker" if here is None else f"worker.{here.rank}"
    logs.setup(name, configured.log_format, configured.log_level)
    # May replace this process by itself, so it comes before the lifeline is taken up and MLX is imported.
    preload_openblas(sys.argv)
    lifeline.follow_parent()
    if here is None and configured.hosts is None:
        return _run_alone(configured, laps)
    return _run_rank(configured, here, laps)


def _run_alone(configured: WorkerSettings, laps: Laps) -> int:
    from worker.models.load import ModelLoader

    loader = ModelLoader(
        configured.model or None,
        stands_in=configured.stands_in,
        served_name=configured.served_name,
        memory_headroom=configured.memory_headroom,
        memory_limit_bytes=configured.memory_limit_bytes,
        memory_budget=configured.memory_budget,
        task=configured.task,
        text_only=configured.text_only,
        draft_model=configured.draft_model,
        uses_heads=configured.speculation == "auto",
        trials=_trials(),
        laps=laps,
    )
    return _serve(loader, configured, laps, loader.device_memory)


def _trials() -> Path:
    return cache_folder(os.environ, sys.platform) / "trials"


def _run_rank(configured: WorkerSettings, here: place.Place | None, laps: Laps) -> int:
    from worker.line.exits import status_of
    from worker.ranks.loader import SetLoader
    from worker.ranks.meeting import Meeting, backend_of

    backend = backend_of(configured, here)
    if here is not None and here.rank:
        from worker.ranks import follower

        return follower.run(here, configured)
    try:
        leading = SetLoader(configured, Meeting(configured, backend, here), laps, _trials())
    except (ModelError, NoRoomError) as error:
        return status_of(error)
    return _serve(leading, of_set(configured), laps, leading.device_memory)


def _serve(
    loader: Loader, configured: WorkerSettings, laps: Laps, device_memory: Callable[[], Resources]
) -> int:
    from worker.line.service import Service

    try:
        service = Service(loader, configured, device_memory, laps)
    except sockets.EndpointError as error:
        settings.exit_with("worker", error)
    return service.run()


def _look_ahead() -> None:
    from worker.models.beforehand import look_ahead

    look_ahead()


def _status(ended: SystemExit) -> int:
    """What the interpreter would end with, once it has said what it would say."""
    if isinstance(ended.code, str):
        print(ended.code, file=sys.stderr)
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as ended:  # of settings that cannot be taken, in a spare that has imported MLX
        status = _status(ended)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not SystemExit: MLX's threads abort in the interpreter's teardown, and one in the middle of a forward
    # pass would be waited for. Nothing is left to save at this point.
    os._exit(status)
