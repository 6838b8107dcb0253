"""Jobs under launchd: agents of the logged-in user, or daemons, which need no login. launchd.plist(5),
launchctl(1)."""

from __future__ import annotations

import contextlib
import math
import os
import plistlib
import pwd
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from deploy.serving.commandlines import SOURCE_FOLDER, python_module
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
_MACHINE = "system"
_TOP_LEVEL = re.compile(r"^\t([^\t=]+) = (.*)$", re.MULTILINE)
_MEETING_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain of launchd. `target`: its name for `launchctl`. `folder`: its plists. `variables`: those of
    each job. `user`: whose processes the jobs of root are; None: those of the domain's user."""

    target: str
    folder: Path
    logs: Path
    variables: Mapping[str, str]
    user: pwd.struct_passwd | None = None


def agents(home: Path, environ: Mapping[str, str], uid: int) -> Domain:
    """Return the domain of a user who is logged in at the screen."""
    library = home / "Library"
    # The endpoint between gateway and worker depends on these, so they must not vary by session.
    meeting = {name: environ[name] for name in _MEETING_VARIABLES if name in environ}
    variables = meeting or {"TMPDIR": tempfile.gettempdir()}
    return Domain(f"gui/{uid}", library / "LaunchAgents", library / "Logs" / "roundhouse", variables)


def daemons(user: pwd.struct_passwd | None, library: Path = Path("/Library")) -> Domain:
    """Return the domain of the machine. `user`: None if nothing is installed there."""
    home = {"HOME": user.pw_dir, "USER": user.pw_name} if user else {}
    return Domain(_MACHINE, library / "LaunchDaemons", library / "Logs" / "roundhouse", home, user)


class Launchd:
    """The jobs of one domain."""

    pattern = f"{PREFIX}*{SUFFIX}"

    def __init__(self, domain: Domain, run: Run = run_command) -> None:
        self.folder = domain.folder
        self._logs = domain.logs
        self._domain = domain
        self._run = run

    def check(self) -> None:
        done = self._run(["launchctl", "print", self._domain.target])
        if done.returncode:
            reason = done.stderr.strip()
            raise ServiceError(f"cannot reach launchd; agents need a user logged in at the screen: {reason}")

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        if self._domain.target != _MACHINE:
            yield
            return
        if (user := self._domain.user) is None:
            raise ServiceError("say whose processes they will be: --user NAME, not root")
        with acting_as(user):
            for path in (Path(sys.executable), SOURCE_FOLDER):
                if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
                    advice = "install Roundhouse in a folder that all can read, such as /opt/roundhouse"
                    raise ServiceError(f"{user.pw_name} cannot read {path}: {advice}")
            yield

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
            "EnvironmentVariables": {**self._domain.variables, **job.environment},
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
        if self._domain.user is not None:
            plist["UserName"] = self._domain.user.pw_name
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
        if (user := self._domain.user) is not None:
            os.chown(self._logs, user.pw_uid, user.pw_gid)
        for name in names:
            if name not in changed and self._print(name) is not None:
                continue
            self.unload([name])
            self._starts(_job_name(name)).unlink(missing_ok=True)
            must(self._run(["launchctl", "enable", self._target(name)]))
            must(self._run(["launchctl", "bootstrap", self._domain.target, str(self.folder / name)]))

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
        return f"{self._domain.target}/{name.removesuffix(SUFFIX)}"


def for_this_user(user: str | None) -> Launchd:
    """Return the agents of the current user; of root, the daemons, which run as `user`. Raises
    `ServiceError`."""
    if os.geteuid():
        if user is not None:
            raise ServiceError("--user is for services that start without a login, which need sudo")
        return Launchd(agents(Path.home(), os.environ, os.getuid()))
    try:
        return Launchd(daemons(pwd.getpwnam(user) if user is not None else None))
    except KeyError:
        raise ServiceError(f"there is no user {user}; docs/services.md says how to create one") from None


@contextlib.contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[None]:
    """Be another user, with their home: root only. What is read or created inside is read or created by
    them; root's further groups stay, of which macOS cannot always set as many as there are."""
    uid, gid, environ = os.geteuid(), os.getegid(), dict(os.environ)
    for name in _MEETING_VARIABLES:
        os.environ.pop(name, None)
    os.environ["HOME"] = user.pw_dir
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.environ.clear()
        os.environ.update(environ)


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
