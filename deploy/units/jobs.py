"""Jobs for a service manager: one for each child of `serve`, or one for `serve` itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.serving.commandlines import API_KEYS, SOURCE_FOLDER, flag_words, flags_of, python_module
from deploy.serving.models import split_name
from deploy.serving.resolution import Resolved, resolve
from deploy.serving.settings import PROGRAM, ServeSettings, shown_flags
from deploy.supervisor.child import ServedModel, split_models
from deploy.supervisor.children import KILL_WAIT_S_MAX
from deploy.supervisor.restarts import RestartLimits
from deploy.units import worker_with_spare
from deploy.units.worker_with_spare import JobSettings
from protocol import lifeline, sockets
from protocol.adapters import split_setting
from protocol.common.api_keys import check_exposure
from protocol.common.model_folder import POCKET, folder_of
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import CONFIG_FLAG, SettingsError, flags, parse_flags
from protocol.settings.worker import WorkerSettings

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
    """Return the jobs for the flags of `serve`. Raises `SettingsError`, `EndpointError`, `KeysError`
    or `OSError`."""
    argv, environ = absolute_flags(argv), absolute_variables(environ)
    resolved = resolve(argv, environ)
    check_file(resolved)
    gateway = resolved.gateway
    if not (gateway.api_keys or gateway.api_keys_file or gateway.insecure_no_keys):
        check_exposure([_address(gateway)[0]])
    [model, *others] = resolved.models
    # A service manager cannot decide which models run, or switch to fallbacks.
    if others or model.replicas > 1 or model.fallback:
        return [_job_of_serve(argv, environ, resolved)]
    worker = resolved.workers[model.name][0]
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


# Absolute paths in the settings of a service, which does not run in the folder it was installed from.

_PREFIX = "ROUNDHOUSE_"
_FOLDER_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
_FLAGS = (CONFIG_FLAG, *flags(GatewaySettings), *flags(WorkerSettings))
_PATHS = {flag.field for flag in _FLAGS if flag.metavar in ("FILE", "DIR")}
_MODELS = ("model", "draft_model", "fallback")


def absolute_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of `serve` with absolute paths. Raises `SettingsError`."""
    given, unknown = parse_flags(shown_flags(), argv, PROGRAM)
    words = [
        flag
        for name, value in given.items()
        for each in (value if isinstance(value, list) else [value])
        for flag in flag_words(name, _absolute(name, each))
    ]
    return [*words, *unknown]


def absolute_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with absolute paths in the variables that are settings."""
    found = dict(environ)
    for name in (*_PATHS, *_MODELS, "adapters"):
        if value := found.get(variable := _PREFIX + name.upper()):
            found[variable] = str(_absolute(name, value))
    return found | {name: _path(found[name]) for name in _FOLDER_VARIABLES if found.get(name)}


def check_file(resolved: Resolved) -> None:
    """Raise `SettingsError` for relative paths in the file, which cannot be changed for the service."""
    tables = dict(resolved.document)
    tables |= {f"models.{name}": each for name, each in tables.pop("models", {}).items()}
    wrong = [
        f"[{section}] {name}: a service needs an absolute path: {absolute} (from {resolved.config})"
        for section, table in tables.items()
        for name, value in table.items()
        if (absolute := _absolute(name, value)) != value and not str(value).startswith("~")
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))


def _absolute(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(name, each) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if name in _PATHS:
        return _path(value)
    if name == "adapters":
        return ",".join(map(_adapter, value.split(",")))
    if name in _MODELS:
        convert = _plan if name == "fallback" else _named_model
        return ",".join(map(convert, value.split(",")))
    return value


def _adapter(word: str) -> str:
    pair = split_setting(word.strip())
    return word if pair is None else f"{pair[0]}={pair[1]}"


def _path(value: str) -> str:
    return str(Path(value).expanduser().absolute())


def _named_model(word: str) -> str:
    name, model = split_name(word)
    return _model(word) if name is None else f"{name}={_model(model)}"


def _model(word: str) -> str:
    """Return a folder as an absolute path, and anything else, such as an id, as it is."""
    return _path(word) if word not in ("", POCKET) and folder_of(word).exists() else word


def _plan(word: str) -> str:
    model, hosts = split_models(word)
    return _model(model or "") + (f"@{_path(hosts)}" if hosts else "")
