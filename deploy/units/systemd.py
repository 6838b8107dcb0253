"""Jobs as systemd user units: systemd.service(5), systemd.socket(5), systemctl(1)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from deploy.units.jobs import FILES_MAX, Job
from deploy.units.manager import COMMAND_S_MAX, Run, ServiceError, Status, must, run_command
from protocol.settings.reader import EXIT_CONFIGURATION

PREFIX = "roundhouse-"
SERVICE = ".service"
SOCKET = ".socket"
BACKLOG = 2048
FILES_HARD_MAX = 65536
RESTART_S = 0.5

_STOP = re.compile(r"^TimeoutStopSec=([0-9.]+)$", re.MULTILINE)
_PROPERTIES = ("LoadState", "MainPID", "ExecMainCode", "ExecMainStatus", "NRestarts", "Result")


class Systemd:
    """The units of one user."""

    pattern = f"{PREFIX}*"

    def __init__(self, home: Path, environ: Mapping[str, str], run: Run = run_command) -> None:
        # The XDG base directory specification demands that a relative path be ignored.
        named = Path(environ.get("XDG_CONFIG_HOME", ""))
        self.folder = (named if named.is_absolute() else home / ".config") / "systemd" / "user"
        self._run = run

    def check(self) -> None:
        done = self._systemctl("daemon-reload")
        if done.returncode:
            raise ServiceError(f"cannot reach your user's systemd: {done.stderr.strip()}")

    def acting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def files(self, jobs: Sequence[Job]) -> dict[str, str]:
        files = {}
        for job in jobs:
            if job.address is not None:
                files[PREFIX + job.name + SOCKET] = socket_unit(job.name, *job.address)
            files[PREFIX + job.name + SERVICE] = service_unit(job)
        return files

    def load(self, names: Collection[str], changed: Collection[str]) -> None:
        must(self._systemctl("daemon-reload"))
        self._systemctl("reset-failed", *names)  # fails for a unit that has never run
        must(self._systemctl("enable", *names))
        # A changed socket is bound again while its service is down; an unchanged one keeps listening.
        if changed:
            must(self._systemctl("restart", *changed, within_s=self._end_s_max(changed)))
        must(self._systemctl("start", *names))

    def restart(self, name: str) -> None:
        self._systemctl("reset-failed", name)  # fails if it has not failed
        must(self._systemctl("restart", name, within_s=self._end_s_max([name])))

    def unload(self, names: Collection[str]) -> None:
        must(self._systemctl("disable", "--now", *names, within_s=self._end_s_max(names)))
        self._systemctl("reset-failed", *names)  # fails if no unit has failed

    def forget(self) -> None:
        must(self._systemctl("daemon-reload"))

    def leftovers(self) -> list[Path]:
        return []  # the journal is left alone

    def statuses(self, names: Collection[str]) -> list[Status]:
        return [
            read_status(name.removeprefix(PREFIX).removesuffix(SERVICE), self._show(name))
            for name in names
            if name.endswith(SERVICE)
        ]

    def hint(self) -> str:
        return (
            f"logs: journalctl --user -u '{PREFIX}*'\n"
            "to keep it running while you are not logged in: loginctl enable-linger"
        )

    def _show(self, name: str) -> str:
        return must(self._systemctl("show", f"--property={','.join(_PROPERTIES)}", name))

    def _systemctl(self, *words: str, within_s: float = COMMAND_S_MAX) -> subprocess.CompletedProcess[str]:
        return self._run(["systemctl", "--user", *words], within_s)

    def _end_s_max(self, names: Collection[str]) -> float:
        """Return the timeout of a command that stops these units one after another."""
        units = [self.folder / name for name in names]
        found = [_STOP.search(unit.read_text(encoding="utf-8")) for unit in units if unit.exists()]
        return COMMAND_S_MAX + sum(float(match[1]) for match in found if match)


def for_this_user(user: str | None) -> Systemd:
    """Return the units of the current user. Raises `ServiceError` if `user` is given."""
    if user is not None:
        raise ServiceError("--user is for launchd; here `loginctl enable-linger` makes a login unnecessary")
    return Systemd(Path.home(), os.environ)


def service_unit(job: Job) -> str:
    """Return the unit of one job. `Type=exec` suffices, because clients wait at its socket."""
    socket = f"{PREFIX}{job.name}{SOCKET}"
    unit = [f"Requires={socket}", f"After={socket}"] if job.address is not None else []
    variables = [f"Environment={_quote(f'{name}={value}')}" for name, value in job.environment.items()]
    return _render(
        Unit=[
            f"Description=Roundhouse {job.name}",
            *unit,
            f"StartLimitIntervalSec={job.window_s:g}",
            f"StartLimitBurst={job.starts_max}",
        ],
        Service=[
            "Type=exec",
            f"ExecStart={' '.join(_quote(word).replace('$', '$$') for word in job.argv)}",
            f"WorkingDirectory={_literal(str(job.folder))}",
            *variables,
            "Restart=on-failure",
            f"RestartSec={RESTART_S:g}",
            f"RestartPreventExitStatus={EXIT_CONFIGURATION}",
            # SIGTERM to the main process, then SIGKILL to what is left.
            "KillMode=mixed",
            f"TimeoutStopSec={job.stop_timeout_s:g}",
            f"LimitNOFILE={FILES_MAX}:{FILES_HARD_MAX}",
            "UMask=0077",
        ],
        Install=["WantedBy=default.target"],
    )


def socket_unit(name: str, host: str, port: int) -> str:
    """Return the unit that listens for the service of the same name, even while that is not running."""
    address = f"[{host}]" if ":" in host else host
    return _render(
        Unit=[f"Description=Client socket of the Roundhouse {name}"],
        Socket=[f"ListenStream={address}:{port}", f"Backlog={BACKLOG}"],
        Install=["WantedBy=sockets.target"],
    )


def _render(**sections: Sequence[str]) -> str:
    return "\n".join("\n".join([f"[{name}]", *lines, ""]) for name, lines in sections.items())


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def _quote(text: str) -> str:
    """Quote one word as in systemd.syntax(7)."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c, c) for c in _literal(text)) + '"'


def read_status(name: str, shown: str) -> Status:
    """Parse the output of `systemctl show`."""
    properties = dict(line.split("=", 1) for line in shown.split("\n") if "=" in line)
    if properties.get("LoadState") != "loaded":
        return Status(name, None, properties.get("LoadState", "not loaded"))
    pid = int(properties.get("MainPID", "0")) or None
    restarts = properties.get("NRestarts", "0")
    words = [] if pid else [_describe_exit(properties)]
    words += [f"{restarts} restarts"] if restarts != "0" else []
    return Status(name, pid, ", ".join(word for word in words if word))


def _describe_exit(properties: Mapping[str, str]) -> str:
    code, status = properties.get("ExecMainCode", "0"), int(properties.get("ExecMainStatus", "0"))
    limit = " (given up)" if properties.get("Result") == "start-limit-hit" else ""
    if code == str(int(os.CLD_EXITED)):
        return f"status {status}{limit}"
    if code in (str(int(os.CLD_KILLED)), str(int(os.CLD_DUMPED))):
        return signal.Signals(status).name + limit
    return limit.strip(" ()")
