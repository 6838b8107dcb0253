"""What a service manager is to `roundhouse service`, whichever it is, and how its commands are run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.units.jobs import Job

COMMAND_S_MAX = 60.0


class ServiceError(Exception):
    """The service manager is not there, or refuses."""


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
