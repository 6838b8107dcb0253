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

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from deploy.units import launchd, systemd
from deploy.units.jobs import Job
from deploy.units.manager import Manager, Status

PROGRAM = "roundhouse service"


def manager_here() -> Manager:
    """The one that this machine has, for the user who asks."""
    return launchd.for_this_user() if sys.platform == "darwin" else systemd.for_this_user()


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
