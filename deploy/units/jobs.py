"""Jobs for a service manager: one for each child of `serve`, or one for `serve` itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.serving.commandlines import API_KEYS, SOURCE_FOLDER, flags_of, python_module
from deploy.serving.resolution import Resolved, resolve
from deploy.serving.settings import ServeSettings
from deploy.supervisor.child import ServedModel
from deploy.supervisor.children import KILL_WAIT_S_MAX
from deploy.supervisor.restarts import RestartLimits
from deploy.units import worker_with_spare
from deploy.units.absolute import absolute_flags, absolute_variables, check_file
from deploy.units.worker_with_spare import JobSettings
from protocol import lifeline, sockets
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import SettingsError

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
    resolved = resolve(argv, environ)
    check_file(resolved)
    [model, *others] = resolved.models
    # A service manager cannot decide which models run, or switch to fallbacks.
    if others or model.replicas > 1 or model.fallback:
        return [_job_of_serve(argv, environ, resolved)]
    gateway, worker = resolved.gateway, resolved.workers[model.name][0]
    found = Job(
        name="worker",
        argv=[*python_module("worker"), *flags_of(resolved.for_workers[model.name], resolved.config)],
        environment=_existing_settings(environ, without=API_KEYS),
        folder=SOURCE_FOLDER,
        stop_timeout_s=resolved.serve.stop_timeout_s + worker.drain_timeout_s,
        starts_max=resolved.serve.deaths_max + 1,
        window_s=RestartLimits().window_s,
    )
    # The runtime directory may be gone after a reboot. A gateway without this flag creates it again, with
    # the required mode, and arrives at the same endpoint.
    values = dict(resolved.for_gateway)
    if gateway.endpoint == sockets.default_endpoint(gateway.server):
        del values["endpoint"]
    given_keys = values.get("api_keys")
    keys = {API_KEYS: ",".join(gateway.api_keys)} if given_keys and not given_keys.own else {}
    return [
        replace(
            found,
            name="gateway",
            argv=[*python_module("broker"), *flags_of(values, resolved.config)],
            environment=_existing_settings(environ, without=API_KEYS) | keys,
            stop_timeout_s=resolved.serve.stop_timeout_s + gateway.drain_timeout_s,
            address=_address(gateway),
        ),
        _with_spare(found, model, resolved.serve, gateway) if resolved.serve.spare else found,
    ]


def _with_spare(job: Job, model: ServedModel, given: ServeSettings, gateway: GatewaySettings) -> Job:
    """Return the worker's job, run by a process of ours that also keeps its spare."""
    settings = JobSettings(
        host=gateway.host,
        port=gateway.port,
        name=model.name,
        model=model.model or "",
        stop_timeout=job.stop_timeout_s,
        ready_timeout=given.ready_timeout_s,
        deaths_max=given.deaths_max,
        restart_delay_max=given.restart_delay_max_s,
        log_format=given.log_format or "text",
        log_level=given.log_level or "info",
    )
    # That process kills a worker that does not end in time, and then needs time to end itself.
    argv = worker_with_spare.command(job.argv, settings)
    return replace(job, argv=argv, stop_timeout_s=job.stop_timeout_s + KILL_WAIT_S_MAX)


def _job_of_serve(argv: Sequence[str], environ: Mapping[str, str], resolved: Resolved) -> Job:
    if any(word.split("=")[0] in ("--api-key", "--api-keys") for word in argv):
        raise SettingsError(
            "api_keys: a flag on the command line is visible to all users; use --api-keys-file"
        )
    return Job(
        name="serve",
        argv=[*python_module("deploy"), "serve", *argv],
        environment=_existing_settings(environ),
        folder=SOURCE_FOLDER,
        stop_timeout_s=2 * (resolved.serve.stop_timeout_s + resolved.drain_timeout_s),
        starts_max=resolved.serve.deaths_max + 1,
        window_s=RestartLimits().window_s,
    )


def _existing_settings(environ: Mapping[str, str], without: str = "") -> dict[str, str]:
    """Return the variables that the job needs: service managers do not pass on the environment."""
    left_out = (lifeline.VARIABLE, without)
    kept = (name for name in environ if name.startswith(_KEPT_VARIABLES) and name not in left_out)
    return {name: environ[name] for name in kept}


def _address(gateway: GatewaySettings) -> tuple[str, int]:
    """Return the address that the gateway listens on. Service managers need an address, not a host name."""
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    found = socket.getaddrinfo(gateway.host, gateway.port, family, socket.SOCK_STREAM)[0][4]
    return str(found[0]), gateway.port


def masked(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs for display, without the values of variables with secret-sounding names."""
    return [
        replace(job, environment={name: _mask(name, value) for name, value in job.environment.items()})
        for job in jobs
    ]


def _mask(name: str, value: str) -> str:
    return "(not shown)" if any(word in name for word in _SECRET_WORDS) else value
