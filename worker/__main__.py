"""`python -m worker`: one model in one process."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from protocol import lifeline, sockets
from protocol.common import gc_heap, logs, temporary_folder
from protocol.common.cache_folder import cache_folder
from protocol.common.state_folder import state_folder
from protocol.hosts import HostsError
from protocol.settings import reader as settings
from protocol.settings.job_status import status_for_manager
from protocol.settings.worker import WorkerSettings
from protocol.types import Resources
from worker.interfaces import InsufficientMemoryError, Loader, ModelError
from worker.process import environment, spare
from worker.process.preload import preload_openblas
from worker.process.startup_timer import StartupTimer
from worker.ranks import rank_info

IMPORTS = (
    "worker.gateway.service",
    "worker.load.load",
    "worker.load.text",
    "worker.load.capabilities",
    "worker.load.vision",
    "worker.load.embedding",
)
"""Imports that every model needs, without its own architecture."""

START_S_MAX = 300.0
"""Maximum seconds from the start of the process, or the assignment of a spare, until the service runs, whose
watchdog then takes over. The process prints all stacks and exits, so that another is started: an import or a
lock that hangs would leave its requests waiting for ever."""


def main() -> int:
    """Load the model and serve the gateway until a stop signal. Return the exit status."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    document = spare.settings_document(IMPORTS, _look_ahead)
    faulthandler.dump_traceback_later(START_S_MAX, exit=True)
    timer = StartupTimer()
    configured = settings.read_or_exit(
        WorkerSettings,
        "worker",
        sys.argv[1:],
        os.environ,
        program="roundhouse worker",
        about="Run one model and serve requests from the gateway.",
        document=document,
    )
    try:
        here = rank_info.find(os.environ)
    except HostsError as error:
        settings.exit_with("worker", str(error))
    name = "worker" if here is None else f"worker.{here.rank}"
    logs.setup(name, configured.log_format, configured.log_level)
    # May re-execute this process, so it comes before following the lifeline and importing MLX.
    preload_openblas(sys.argv)
    environment.raise_buffer_limits(os.environ)
    environment.import_upstream()
    environment.protect_kernels()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # until the service handles it
    lifeline.follow_parent()
    if here is None and configured.hosts is None:
        return _run_alone(configured, timer)
    return _run_rank(configured, here, timer)


def _end(number: int, frame: object) -> None:
    """End by a stop signal, as without this handler, but leave no files behind."""
    temporary_folder.delete_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_alone(configured: WorkerSettings, timer: StartupTimer) -> int:
    from worker.load.load import ModelLoader
    from worker.load.options import LoadOptions

    folder = state_folder(os.environ) / "exactness" if configured.exact else None
    options = replace(LoadOptions.of(configured), probe_folder=_probe_folder(), exactness_folder=folder)
    loader = ModelLoader(configured.model or None, options, timer=timer)
    return _serve(loader, configured, timer, loader.device_memory)


def _probe_folder() -> Path:
    return cache_folder(os.environ, sys.platform) / "trials"


def _run_rank(configured: WorkerSettings, here: rank_info.RankInfo | None, timer: StartupTimer) -> int:
    from worker.process.exit_codes import status_of
    from worker.ranks.loader import SetLoader, of_set
    from worker.ranks.rendezvous import Rendezvous, backend_of

    faulthandler.cancel_dump_traceback_later()  # the rendezvous has a timeout of its own, which may be longer
    if configured.adapters:
        settings.exit_with("worker", "adapters: a model of several ranks serves none: leave --adapter out.")
    backend = backend_of(configured, here)
    if here is not None and here.rank:
        from worker.ranks import follower

        return follower.run(here, configured)
    try:
        meeting = Rendezvous(configured, backend, here)
    except (ModelError, InsufficientMemoryError) as error:
        return status_of(error)
    try:
        leading = SetLoader(configured, meeting, timer)
        return _serve(leading, of_set(configured), timer, leading.device_memory)
    finally:
        meeting.tidy()


def _serve(
    loader: Loader, configured: WorkerSettings, timer: StartupTimer, device_memory: Callable[[], Resources]
) -> int:
    from worker.gateway.service import Service

    try:
        service = Service(loader, configured, device_memory, timer)
    except sockets.EndpointError as error:
        settings.exit_with("worker", error)
    faulthandler.cancel_dump_traceback_later()
    return service.run()


def _look_ahead() -> None:
    """Open the embedded model's tokenizer and processor, which import many modules, and initialize the
    device. The results are discarded."""
    import mlx.core as mx
    from mlx_vlm.utils import get_model_and_args

    from protocol.common.model_folder import POCKET
    from worker.input.media.processor import load_processor
    from worker.input.prompts.prompt import open_tokenizer
    from worker.load.config import read_config
    from worker.pocket import MODEL_PATH

    open_tokenizer(MODEL_PATH, ())
    architecture = read_config(MODEL_PATH, POCKET).architecture
    get_model_and_args({"model_type": architecture})  # registers the processor
    load_processor(MODEL_PATH)
    logging.getLogger(__name__).debug("%s", mx.default_device())
    gc_heap.freeze()  # so that there is less to scan when the model is loaded


def _status(ended: SystemExit) -> int:
    """Return the exit status for `ended`, and print its message to stderr, as the interpreter would."""
    if isinstance(ended.code, str):
        print(ended.code, file=sys.stderr)
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as ended:  # invalid settings, in a spare that has imported MLX
        status = _status(ended)
    temporary_folder.delete_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not SystemExit: MLX's threads abort in the interpreter's teardown, which would also wait for a running
    # forward pass. Nothing is left to save at this point.
    os._exit(status_for_manager(status))
