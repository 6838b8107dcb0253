"""Jobs for a service manager: one for each child of `serve`, or one for `serve` itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.serving import serve
from deploy.serving.commandlines import SOURCE_FOLDER, python_module
from deploy.serving.settings import GATEWAY, ServeSettings, table
from deploy.supervisor.child import ServedModel
from deploy.supervisor.children import KILL_WAIT_S_MAX
from deploy.supervisor.restarts import RestartLimits
from deploy.units import worker_with_spare
from deploy.units.absolute import absolute_flags, absolute_variables, check_file
from protocol import lifeline, sockets
from protocol.settings import reader as settings

FILES_MAX = 8192
"""A job's soft limit on open files. Each connection is one, and launchd's default is 256."""

_KEPT_VARIABLES = ("ROUNDHOUSE_", "HF_", "XDG_CACHE_HOME")
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process that the service manager keeps running. `address`: that of the socket that it inherits."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    stop_timeout_s: float
    starts_max: int
    window_s: float
    address: tuple[str, int] | None = None


def read(argv: Sequence[str], environ: Mapping[str, str]) -> list[Job]:
    """Return the jobs for the flags of `serve`. Raises `SettingsError`, `EndpointError` or `OSError`."""
    argv, environ = absolute_flags(argv), absolute_variables(environ)
    given, children = serve.read(argv, environ)
    config = settings.config_file(argv, environ)
    check_file(config)
    # A service manager cannot decide which models run, or switch to fallbacks.
    if sum(child.model is not None for child in children) > 1 or any(child.plans for child in children):
        return [_job_of_serve(argv, environ, given, config)]
    found = [
        Job(
            name=child.name,
            argv=_own_endpoint(child.argv) if child.name == "gateway" else child.argv,
            environment=_existing_settings(child.env),
            folder=SOURCE_FOLDER,
            stop_timeout_s=given.stop_timeout_s + given.longest_drain_s(config, child.name),
            starts_max=given.deaths_max + 1,
            window_s=RestartLimits().window_s,
            address=_address(given, config) if child.name == "gateway" else None,
        )
        for child in children
    ]
    if not given.spare:
        return found
    address = serve.address(argv, environ)
    return [
        job if child.model is None else _with_spare(job, child.model, given, address)
        for job, child in zip(found, children, strict=True)
    ]


def _with_spare(job: Job, model: ServedModel, given: ServeSettings, address: tuple[str, int]) -> Job:
    """Return the worker's job, run by a process of ours that also keeps its spare."""
    command = worker_with_spare.command(
        job.argv,
        address=address,
        model=model,
        stop_timeout_s=job.stop_timeout_s,
        ready_timeout_s=given.ready_timeout_s,
        limits=given.restart_limits(),
        log_format=given.log_format,
        log_level=given.log_level,
    )
    # That process kills a worker that does not end in time, and then needs time to end itself.
    return replace(job, argv=command, stop_timeout_s=job.stop_timeout_s + KILL_WAIT_S_MAX)


def _job_of_serve(
    argv: Sequence[str], environ: Mapping[str, str], given: ServeSettings, config: str | None
) -> Job:
    if any(word.split("=")[0] in ("--api-key", "--api-keys") for word in argv):
        raise settings.SettingsError(
            "api_keys: a flag on the command line is visible to all users; use --api-keys-file"
        )
    return Job(
        name="serve",
        argv=[*python_module("deploy"), "serve", *argv],
        environment=_existing_settings(environ),
        folder=SOURCE_FOLDER,
        stop_timeout_s=2 * (given.stop_timeout_s + given.longest_drain_s(config, "gateway", "worker")),
        starts_max=given.deaths_max + 1,
        window_s=RestartLimits().window_s,
    )


def _existing_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the job needs: service managers do not pass on the environment."""
    ours = {name: value for name, value in environ.items() if name.startswith(_KEPT_VARIABLES)}
    ours.pop(lifeline.VARIABLE, None)
    return ours


def _own_endpoint(argv: Sequence[str]) -> list[str]:
    # The runtime directory may be gone after a reboot. A gateway without this flag creates it again, with
    # the required mode, and arrives at the same endpoint.
    return [word for word in argv if not word.startswith(f"--endpoint=ipc://{sockets.runtime_directory()}/")]


def _address(given: ServeSettings, config: str | None) -> tuple[str, int]:
    """Return the address that the gateway listens on. Service managers need an address, not a host name."""
    own = table("gateway", config)
    host = given.host or own.get("host", GATEWAY.host)
    port = given.port or own.get("port", GATEWAY.port)
    if not isinstance(host, str) or not isinstance(port, int):
        raise settings.SettingsError(f"[gateway] in {config}: host must be text and port a number")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    return str(found[0]), port


def masked(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs for display, without the values of variables with secret-sounding names."""
    return [
        replace(job, environment={name: _mask(name, value) for name, value in job.environment.items()})
        for job in jobs
    ]


def _mask(name: str, value: str) -> str:
    return "(not shown)" if any(word in name for word in _SECRET_WORDS) else value
