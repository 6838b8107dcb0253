"""`roundhouse service`: the gateway and the workers as jobs of the machine's own service manager.

What `serve` would run as its children becomes one job each, so that either restarts alone: a worker outlives
its gateway and is found again at the endpoint in the runtime directory. The manager (`launchd`, `systemd`)
does what the supervisor does under `serve`, and keeps the gateway's listening socket besides.

Several models are one job, `serve` itself: who is to run changes with what is asked for, and that no manager
decides.

All that is installed are files whose names begin with the manager's prefix, in one folder: nothing else
remembers it, so what is found there is what is replaced, shown and removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from deploy.serving import serve
from deploy.supervisor.restarts import RestartLimits
from protocol import lifeline, settings, sockets

PROGRAM = "roundhouse service"
COMMAND_S_MAX = 60.0
FILES_MAX = 8192
"""A job's soft limit on open files: each connection is one, and launchd's default is 256."""

_KEPT_VARIABLES = ("ROUNDHOUSE_", "HF_", "XDG_CACHE_HOME")
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY")


class ServiceError(Exception):
    """The service manager is not there, or refuses."""


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


@dataclass(frozen=True, slots=True)
class Status:
    """What the manager knows of an installed job. `pid` is None when it does not run."""

    name: str
    pid: int | None
    last_exit: str


class Manager(Protocol):
    """launchd or systemd. All methods may raise `ServiceError` or `OSError`."""

    folder: Path
    """Where its files are. They are for their owner only: variables may hold keys."""
    pattern: str
    """What the names of ours match."""

    def check(self) -> None:
        """Raises `ServiceError` when there is no manager to talk to, before anything is touched."""

    def files(self, jobs: Sequence[Job]) -> dict[str, str]:
        """What is to be installed, text by file name."""

    def load(self, names: Collection[str], changed: Collection[str]) -> None:
        """The files are there: run all of them, those that have `changed` anew."""

    def unload(self, names: Collection[str]) -> None:
        """Stop them, before their files go. Waits until they have ended."""

    def forget(self) -> None:
        """The files are gone."""

    def leftovers(self) -> list[Path]:
        """Whatever else the jobs have left on disk, folders last."""

    def statuses(self, names: Collection[str]) -> list[Status]: ...

    def hint(self) -> str:
        """What a person should know after an installation."""


class Run(Protocol):
    """Runs one of the manager's commands. Raises `ServiceError` when it is not there or does not end."""

    def __call__(
        self, words: Sequence[str], within_s: float = COMMAND_S_MAX
    ) -> subprocess.CompletedProcess[str]: ...


def run_command(words: Sequence[str], within_s: float = COMMAND_S_MAX) -> subprocess.CompletedProcess[str]:
    """See `Run`."""
    if shutil.which(words[0]) is None:
        raise ServiceError(f"{words[0]} is not on this machine")
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{' '.join(words)} did not end within {within_s:g} s") from error


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Its output. Raises `ServiceError` with what it said if it failed."""
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
        raise ServiceError(f"{' '.join(map(str, done.args))}: {said}")
    return done.stdout


def read(argv: Sequence[str], environ: Mapping[str, str]) -> list[Job]:
    """The jobs for the flags of `serve`. Raises `SettingsError`, `EndpointError` or `OSError`."""
    given, children = serve.read(argv, environ)
    if sum(child.model is not None for child in children) > 1:
        return [_job_of_serve(argv, environ, given)]
    config = serve.config_file(argv, environ)
    return [
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


def _drain_s(name: str, given: serve.ServeSettings, environ: Mapping[str, str], config: str | None) -> float:
    """What the requests of this job may get to end, at the most, whoever told it so: `serve` tells the worker
    alone, a section of the file and the variable whomever they concern."""
    own = tomllib.loads(Path(config).read_text()).get(name) if config else None
    told: list[Any] = [own.get("drain_timeout") if isinstance(own, dict) else None]
    told.append(given.drain_timeout_s if name == "worker" else environ.get("ROUNDHOUSE_DRAIN_TIMEOUT"))
    longest = serve.DRAIN_TIMEOUT_S
    for value in told:
        # What is no number is for the job itself to refuse.
        with contextlib.suppress(TypeError, ValueError):
            longest = max(longest, float(value))
    return longest


def _job_of_serve(argv: Sequence[str], environ: Mapping[str, str], given: serve.ServeSettings) -> Job:
    if any(word.split("=")[0] in ("--api-key", "--api-keys") for word in argv):
        raise settings.SettingsError(
            "api_keys: a flag would be on the command line for all to see; name a file"
        )
    return Job(
        name="serve",
        argv=[*serve.python_module("deploy"), "serve", *argv],
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


def _address(given: serve.ServeSettings, config: str | None) -> tuple[str, int]:
    """Where the gateway would listen by itself. Service managers want it as an address, not as a name."""
    own = serve.gateway_table(config)
    host, port = given.host or own.get("host", "127.0.0.1"), given.port or own.get("port", serve.PORT)
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


def install(manager: Manager, jobs: Sequence[Job]) -> list[str]:
    """Install these jobs and no others; what has not changed runs on. The files that are new or different."""
    manager.check()
    wanted = manager.files(jobs)
    before = {path.name: path.read_text() for path in _installed(manager)}
    _withdraw(manager, [name for name in before if name not in wanted])
    changed = [name for name, text in wanted.items() if before.get(name) != text]
    manager.folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        _write_private(manager.folder / name, wanted[name])
    manager.load(list(wanted), changed)
    return changed


def reload(manager: Manager) -> list[str]:
    """Have the installed worker end its requests and start anew; the gateway keeps those that it cannot end
    in time for the next one. The files of what was restarted: none where nothing is installed.

    The manager ends the old one first, so nobody asks beforehand whether two would fit: whether the memory of
    the old one has come back by then, the new one sees for itself before it loads.
    """
    workers = [path.name for path in _installed(manager) if "worker" in path.name]
    if workers:
        manager.check()
        manager.load(workers, workers)
    return workers


def remove(manager: Manager) -> list[str]:
    """Stop and remove whatever is installed, and what it left. The files that were there."""
    names = [path.name for path in _installed(manager)]
    if names:
        manager.check()
        _withdraw(manager, names)
    for path in manager.leftovers():
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif not any(path.iterdir()):  # else somebody else keeps something there
            path.rmdir()
    return names


def status(manager: Manager) -> tuple[list[str], bool]:
    """A line for each installed job, and whether there are any and all of them run."""
    names = [path.name for path in _installed(manager)]
    if not names:
        return ["nothing is installed"], False
    statuses = manager.statuses(names)
    return [_line(found) for found in statuses], all(found.pid is not None for found in statuses)


def _line(found: Status) -> str:
    last = f"; last exit: {found.last_exit}" if found.last_exit else ""
    if found.pid is None:
        return f"{found.name:<10} does not run{last}"
    since = ""
    try:
        started = time.localtime(psutil.Process(found.pid).create_time())
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", started)
    except psutil.Error:  # it has just ended, or is not ours to look at
        pass
    return f"{found.name:<10} runs as pid {found.pid}{since}{last}"


def _withdraw(manager: Manager, names: Sequence[str]) -> None:
    if not names:
        return
    manager.unload(names)
    for name in names:
        (manager.folder / name).unlink(missing_ok=True)
    manager.forget()


def _installed(manager: Manager) -> list[Path]:
    return sorted(manager.folder.glob(manager.pattern))


def _write_private(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    aside.replace(path)
