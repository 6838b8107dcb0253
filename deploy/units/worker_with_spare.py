"""Job of a worker that has a spare: `python -m deploy.units.worker_with_spare … -- COMMAND`.

No service manager supports spares. This process therefore supervises the worker and its spare inside one
job, as `serve` does; `roundhouse reload` reaches it as it would reach `serve`. It restarts the worker itself.
When it gives up it exits with status 0, so that the service manager does not restart it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

from msgspec import Meta, Struct
from msgspec.structs import asdict

from deploy.serving.commandlines import flag_words, python_module
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.lifecycle import EXIT_GAVE_UP
from deploy.supervisor.machine_crash import crash_logged
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.reloading import Reloading
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import Supervisor
from protocol import sockets
from protocol.common import logs
from protocol.common.state_folder import DEFAULT_HOST, server_name
from protocol.settings import reader
from protocol.settings.job_status import exits_for_manager
from protocol.settings.worker import WorkerSettings

PROGRAM = "roundhouse service"
NAME = "worker"


class JobSettings(Struct, frozen=True, kw_only=True):
    """Settings of the job itself. `host`, `port`: of the gateway. `stop_timeout`: includes the time to
    drain."""

    host: Annotated[str, Meta(description="address of the gateway")] = DEFAULT_HOST  # none in earlier jobs
    port: Annotated[int, Meta(description="port of the gateway")]
    name: Annotated[str, Meta(description="model name in the API")]
    model: Annotated[str, Meta(description="model folder or Hugging Face id")] = ""
    stop_timeout: Annotated[float, Meta(description="seconds that the worker has to stop")]
    ready_timeout: Annotated[float, Meta(description="seconds that a reloaded worker has to become ready")]
    deaths_max: Annotated[int, Meta(description="maximum deaths within five minutes")]
    restart_delay_max: Annotated[float, Meta(description="maximum delay before a restart")]
    log_format: Annotated[logs.Format, Meta(description="text or json")] = "text"
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"


def command(worker: Sequence[str], job: JobSettings) -> list[str]:
    """Return the command line that supervises the command line `worker`."""
    words = [word for name, value in asdict(job).items() for word in flag_words(name, value)]
    return [*python_module("deploy.units.worker_with_spare"), *words, "--", *worker]


@exits_for_manager()
def main() -> NoReturn:
    """Keep the worker running until stopped."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    try:
        job = reader.read(JobSettings, "service", words[:end], {}, program=PROGRAM, about="")
        supervisor = _supervisor(job, words[end + 1 :])
    except (ValueError, OSError) as error:
        reader.exit_with(PROGRAM, error)
    logs.setup("service", job.log_format, job.log_level)
    with crash_logged(os.environ, sys.platform):
        status = supervisor.run()
    if status == EXIT_GAVE_UP:
        logging.getLogger(__name__).error("giving up; `roundhouse service install` starts it again")
        status = 0
    sys.exit(status)


def _supervisor(job: JobSettings, worker: Sequence[str]) -> Supervisor:
    """Raises `ValueError` or `OSError`."""
    served = ServedModel(name=job.name, model=job.model or None)
    end = worker.index("-m") + 2

    def children() -> list[Child]:
        settings = reader.read(WorkerSettings, NAME, worker[end:], os.environ, program=PROGRAM, about="")
        is_set = settings.hosts is not None
        return [Child(NAME, worker[:end], dict(os.environ), settings, model=served, is_set=is_set)]

    path = sockets.control_path(server_name(job.host, job.port))
    return Supervisor(
        children(),
        stop_timeout_s=job.stop_timeout,
        limits=RestartLimits(deaths_max=job.deaths_max, delay_s_max=job.restart_delay_max),
        # `stop_timeout` already includes the time to drain.
        reloading=Reloading(path, 0.0, job.ready_timeout, fits_beside, children),
        spare=True,
    )


if __name__ == "__main__":
    main()
