"""Jobs as launchd agents of the logged-in user: launchd.plist(5), launchctl(1)."""

from __future__ import annotations

import contextlib
import math
import os
import plistlib
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from deploy.serving.commandlines import python_module
from deploy.supervisor.stderr import stderr_tail
from deploy.units.jobs import FILES_MAX, Job
from deploy.units.manager import COMMAND_S_MAX, Run, ServiceError, Status, must, run_command

PREFIX = "mlx-roundhouse."
SUFFIX = ".plist"
SOCKET = "http"
THROTTLE_S = 5
"""Minimum time between two starts of a job."""

_LET_GO_S_MAX = 10.0
_TAIL_BYTES = 8192
_KILL_WAIT_S = 10.0
_TOP_LEVEL = re.compile(r"^\t([^\t=]+) = (.*)$", re.MULTILINE)
_MEETING_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR")


class Launchd:
    """The agents of one user."""

    pattern = f"{PREFIX}*{SUFFIX}"

    def __init__(self, home: Path, environ: Mapping[str, str], uid: int, run: Run = run_command) -> None:
        self.folder = home / "Library" / "LaunchAgents"
        self._logs = home / "Library" / "Logs" / "roundhouse"
        # The endpoint between gateway and worker depends on these, so they must not vary by session.
        self._meeting = {name: environ[name] for name in _MEETING_VARIABLES if name in environ} or {
            "TMPDIR": tempfile.gettempdir()
        }
        self._domain = f"gui/{uid}"
        self._run = run

    def check(self) -> None:
        done = self._run(["launchctl", "print", self._domain])
        if done.returncode:
            reason = done.stderr.strip()
            raise ServiceError(f"cannot reach launchd; agents need a user logged in at the screen: {reason}")

    def files(self, jobs: Sequence[Job]) -> dict[str, str]:
        return {
            f"{PREFIX}{job.name}{SUFFIX}": plistlib.dumps(self._plist(job), sort_keys=False).decode()
            for job in jobs
        }

    def _plist(self, job: Job) -> dict[str, Any]:
        log = str(self._log(job.name))
        plist: dict[str, Any] = {
            "Label": PREFIX + job.name,
            "ProgramArguments": self._program(job),
            "EnvironmentVariables": {**self._meeting, **job.environment},
            "WorkingDirectory": str(job.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": math.ceil(job.stop_timeout_s),
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": FILES_MAX},
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "Umask": 0o077,
        }
        if job.address is not None:
            host, port = job.address
            plist["Sockets"] = {
                SOCKET: {
                    "SockNodeName": host,
                    "SockServiceName": str(port),
                    "SockType": "stream",
                    "SockFamily": "IPv6" if ":" in host else "IPv4",
                }
            }
        return plist

    def _program(self, job: Job) -> list[str]:
        flags = [f"--starts-file={self._starts(job.name)}", f"--starts-max={job.starts_max}"]
        if job.address is not None:
            flags.append(f"--socket={SOCKET}")
        return [*python_module("deploy.units.launchd_shim"), *flags, "--", *job.argv]

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _starts(self, name: str) -> Path:
        return self._logs / f"{name}.starts"

    def load(self, names: Collection[str], changed: Collection[str]) -> None:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            if name not in changed and self._print(name) is not None:
                continue
            self.unload([name])
            self._starts(_job_name(name)).unlink(missing_ok=True)
            must(self._run(["launchctl", "enable", self._target(name)]))
            must(self._run(["launchctl", "bootstrap", self._domain, str(self.folder / name)]))

    def restart(self, name: str) -> None:
        if self._print(name) is None:
            self.load([name], [])
            return
        # Not `bootout`, which closes the job's socket, nor `kickstart -k`, whose signal is not documented.
        pid, end_s_max = self._status(name).pid, self._exit_timeout_s(name) + _KILL_WAIT_S
        if pid is not None:
            must(self._run(["launchctl", "kill", "SIGTERM", self._target(name)]))
            _await_end(pid, end_s_max)
        self._starts(_job_name(name)).unlink(missing_ok=True)
        must(self._run(["launchctl", "kickstart", self._target(name)]))

    def unload(self, names: Collection[str]) -> None:
        for name in names:
            pid, end_s_max = self._status(name).pid, self._exit_timeout_s(name) + _KILL_WAIT_S
            # It may report that the job is still ending, or missing: the loop below checks that it is gone.
            self._run(["launchctl", "bootout", self._target(name)], COMMAND_S_MAX + end_s_max)
            if pid is not None:
                _await_end(pid, end_s_max)
            deadline = time.monotonic() + _LET_GO_S_MAX
            while self._print(name) is not None:  # the command is slow enough without a pause
                if time.monotonic() > deadline:
                    raise ServiceError(f"launchd did not unload {name} within {_LET_GO_S_MAX:g} s")

    def _exit_timeout_s(self, name: str) -> float:
        """Return the job's exit timeout: the longer of launchd's and the file's, which may be newer."""
        timeout = dict(_TOP_LEVEL.findall(self._print(name) or "")).get("exit timeout", "")
        try:
            written = float(plistlib.loads((self.folder / name).read_bytes())["ExitTimeOut"])
        except (OSError, ValueError, KeyError, TypeError, plistlib.InvalidFileException):
            written = 0.0
        return max(written, float(timeout) if timeout.isdigit() else 0.0)

    def forget(self) -> None:
        """Do nothing: launchd keeps no state of a removed file."""

    def leftovers(self) -> list[Path]:
        files = [path for path in self._logs.glob("*") if path.suffix in (".log", ".starts")]
        return [*files, self._logs] if self._logs.is_dir() else []

    def statuses(self, names: Collection[str]) -> list[Status]:
        return [self._status(name) for name in names]

    def _status(self, name: str) -> Status:
        found = read_status(_job_name(name), self._print(name))
        if found.pid is not None:
            return found
        words = stderr_tail(_tail(self._log(found.name)))
        return replace(found, last_exit=f"{found.last_exit}, last output {words!r}") if words else found

    def hint(self) -> str:
        return f"logs: {self._logs}"

    def _print(self, name: str) -> str | None:
        done = self._run(["launchctl", "print", self._target(name)])
        return None if done.returncode else done.stdout

    def _target(self, name: str) -> str:
        return f"{self._domain}/{name.removesuffix(SUFFIX)}"


def for_this_user() -> Launchd:
    return Launchd(Path.home(), os.environ, os.getuid())


def read_status(name: str, printed: str | None) -> Status:
    """Parse the output of `launchctl print`; None: launchd does not know the job.

    That output is meant for people and differs between releases, so only lines of the top level are used.
    """
    if printed is None:
        return Status(name, None, "not loaded")
    properties = dict(_TOP_LEVEL.findall(printed))
    pid = properties.get("pid", "")
    last = properties.get("last terminating signal") or properties.get("last exit code", "")
    return Status(name, int(pid) if pid.isdigit() else None, "" if "never" in last else last)


def _await_end(pid: int, timeout_s: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(timeout_s)


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _job_name(file: str) -> str:
    return file.removeprefix(PREFIX).removesuffix(SUFFIX)
