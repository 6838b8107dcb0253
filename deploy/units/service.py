"""`roundhouse service`: the gateway and the workers as jobs of the machine's service manager.

Each child of `serve` becomes a job that restarts alone: a worker outlives its gateway, which finds it again
at the endpoint in the runtime directory. The manager (`launchd`, `systemd`) does what the supervisor does
under `serve`, and also keeps the gateway's listening socket open.

Several models are one job, `serve` itself: which of them run changes with the requests, and no service
manager can decide that.

An installation consists only of files in one folder whose names begin with the manager's prefix. The files
found there are those that are replaced, shown and removed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from deploy.units import launchd, systemd
from deploy.units.jobs import Job
from deploy.units.manager import Manager, Status
from deploy.units.systemd import SOCKET
from protocol.common.secure_files import replace_private

PROGRAM = "roundhouse service"


def manager_here(user: str | None = None) -> Manager:
    """Return this machine's service manager for the current user. `user`: whose processes root's jobs are.
    Raises `ServiceError`."""
    return launchd.for_this_user(user) if sys.platform == "darwin" else systemd.for_this_user(user)


def install(manager: Manager, jobs: Sequence[Job]) -> list[str]:
    """Install exactly these jobs, without restarting unchanged ones. Return the new and changed files."""
    manager.check()
    wanted = manager.files(jobs)
    before = {path.name: path.read_text(encoding="utf-8") for path in _installed(manager)}
    _withdraw(manager, [name for name in before if name not in wanted])
    changed = [name for name, text in wanted.items() if before.get(name) != text]
    manager.folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        replace_private(manager.folder / name, wanted[name].encode())
    manager.load(list(wanted), changed)
    return changed


def reload(manager: Manager, *, gateway: bool = False) -> list[str]:
    """Restart the installed worker, or the gateway, after its requests. Return the files of the restarted
    jobs; none if nothing is installed.

    The gateway resends what a worker leaves to the new one, and the manager keeps the gateway's socket open.
    The manager stops the old worker first, so memory for two is not checked. The new worker checks before it
    loads whether the old one's memory is free.
    """
    kind = "gateway" if gateway else "worker"
    names = [path.name for path in _installed(manager) if kind in path.name and path.suffix != SOCKET]
    if names:
        manager.check()
        for name in names:
            manager.restart(name)
    return names


def remove(manager: Manager) -> list[str]:
    """Stop and remove all installed jobs and what they left behind. Return the removed files."""
    names = [path.name for path in _installed(manager)]
    if names:
        manager.check()
        _withdraw(manager, names)
    for path in manager.leftovers():
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif not any(path.iterdir()):  # else it contains files of others
            path.rmdir()
    return names


def status(manager: Manager) -> tuple[list[str], bool]:
    """Return a line for each installed job, and whether at least one is installed and all run."""
    names = [path.name for path in _installed(manager)]
    if not names:
        return ["nothing is installed"], False
    statuses = manager.statuses(names)
    return [_line(found) for found in statuses], all(found.pid is not None for found in statuses)


def _line(found: Status) -> str:
    last = f"; last exit: {found.last_exit}" if found.last_exit else ""
    if found.pid is None:
        return f"{found.name:<10} is not running{last}"
    since = ""
    try:
        started = time.localtime(psutil.Process(found.pid).create_time())
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", started)
    except psutil.Error:  # it has just ended, or access is denied
        pass
    return f"{found.name:<10} is running as pid {found.pid}{since}{last}"


def _withdraw(manager: Manager, names: Sequence[str]) -> None:
    if not names:
        return
    manager.unload(names)
    for name in names:
        (manager.folder / name).unlink(missing_ok=True)
    manager.forget()


def _installed(manager: Manager) -> list[Path]:
    return sorted(manager.folder.glob(manager.pattern))
