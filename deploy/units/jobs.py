"""What `serve` would run as its children, as jobs for a service manager: one each, or `serve` itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.serving import serve
from deploy.serving.commandlines import python_module
from deploy.serving.file import table
from deploy.serving.settings import DRAIN_TIMEOUT_S, PORT, ServeSettings
from deploy.supervisor.children import KILL_WAIT_S_MAX
from deploy.supervisor.models import ServedModel
from deploy.supervisor.restarts import RestartLimits
from deploy.units import kept
from protocol import lifeline, settings, sockets

FILES_MAX = 8192
"""A job's soft limit on open files: each connection is one, and launchd's default is 256."""

_KEPT_VARIABLES = ("ROUNDHOUSE_", "HF_", "XDG_CACHE_HOME")
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process that the service manager is to keep running. `address`: where it takes over a socket."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    stop_timeout_s: float
    starts_max: int
    window_s: float
    address: tuple[str, int] | None = None


def read(argv: Sequence[str], environ: Mapping[str, str]) -> list[Job]:
    """The jobs for the flags of `serve`. Raises `SettingsError`, `EndpointError` or `OSError`."""
    given, children = serve.read(argv, environ)
    # What has to decide which of them runs, or how, is no service manager.
    if sum(child.model is not None for child in children) > 1 or any(child.plans for child in children):
        return [_job_of_serve(argv, environ, given)]
    config = settings.config_file(argv, environ)
    found = [
        Job(
            name=child.name,
            argv=_own_endpoint(child.argv) if child.name == "gateway" else child.argv,
            environment=_kept(child.env),
            folder=Path.cwd(),  # where relative paths among the settings lead
            stop_timeout_s=given.stop_timeout_s + _drain_s(child.name, given, environ, config),
            starts_max=given.deaths_max + 1,
            window_s=RestartLimits().window_s,
            address=_address(given, config) if child.name == "gateway" else None,
        )
        for child in children
    ]
    if not given.spare:
        return found
    port = serve.port(argv, environ)
    return [
        job if child.model is None else _with_spare(job, child.model, given, port)
        for job, child in zip(found, children, strict=True)
    ]


def _with_spare(job: Job, model: ServedModel, given: ServeSettings, port: int) -> Job:
    """The worker's, kept by a process of ours together with its spare."""
    command = kept.command(
        job.argv,
        port=port,
        model=model,
        stop_timeout_s=job.stop_timeout_s,
        ready_timeout_s=given.ready_timeout_s,
        limits=given.restart_limits(),
        log_format=given.log_format,
        log_level=given.log_level,
    )
    # What does not end in time is killed by that process, which then has to end itself.
    return replace(job, argv=command, stop_timeout_s=job.stop_timeout_s + KILL_WAIT_S_MAX)


def _drain_s(name: str, given: ServeSettings, environ: Mapping[str, str], config: str | None) -> float:
    """What the requests of this job may get to end, at the most, whoever told it so: `serve` tells the worker
    alone, a section of the file and the variable whomever they concern."""
    told: list[Any] = [table(name, config).get("drain_timeout")]
    told.append(given.drain_timeout_s if name == "worker" else environ.get("ROUNDHOUSE_DRAIN_TIMEOUT"))
    longest = DRAIN_TIMEOUT_S
    for value in told:
        # What is no number is for the job itself to refuse.
        with contextlib.suppress(TypeError, ValueError):
            longest = max(longest, float(value))
    return longest


def _job_of_serve(argv: Sequence[str], environ: Mapping[str, str], given: ServeSettings) -> Job:
    if any(word.split("=")[0] in ("--api-key", "--api-keys") for word in argv):
        raise settings.SettingsError(
            "api_keys: a flag would be on the command line for all to see; name a file"
        )
    return Job(
        name="serve",
        argv=[*python_module("deploy"), "serve", *argv],
        environment=_kept(environ),
        folder=Path.cwd(),
        stop_timeout_s=2 * given.stop_timeout_s,
        starts_max=given.deaths_max + 1,
        window_s=RestartLimits().window_s,
    )


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    """What the processes are to see of it: a service manager gives them an environment of its own."""
    ours = {name: value for name, value in environ.items() if name.startswith(_KEPT_VARIABLES)}
    ours.pop(lifeline.VARIABLE, None)
    return ours


def _own_endpoint(argv: Sequence[str]) -> list[str]:
    # The runtime directory may be gone after a reboot. A gateway that is not told of it makes it anew, with
    # the mode it must have; it comes to the same endpoint.
    return [word for word in argv if not word.startswith(f"--endpoint=ipc://{sockets.runtime_directory()}/")]


def _address(given: ServeSettings, config: str | None) -> tuple[str, int]:
    """Where the gateway would listen by itself. Service managers want it as an address, not as a name."""
    own = table("gateway", config)
    host, port = given.host or own.get("host", "127.0.0.1"), given.port or own.get("port", PORT)
    if not isinstance(host, str) or not isinstance(port, int):
        raise settings.SettingsError(f"host and port under [gateway] in {config}: text and a number")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    return str(found[0]), port


def masked(jobs: Sequence[Job]) -> list[Job]:
    """The same without the values of variables that sound secret, to be shown."""
    return [
        replace(job, environment={name: _mask(name, value) for name, value in job.environment.items()})
        for job in jobs
    ]


def _mask(name: str, value: str) -> str:
    return "(not shown)" if any(word in name for word in _SECRET_WORDS) else value
