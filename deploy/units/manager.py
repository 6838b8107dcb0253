"""Interface to the service manager, and the runner of its commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.units.jobs import Job

COMMAND_S_MAX = 60.0


class ServiceError(Exception):
    """The service manager is missing, or a command failed."""


@dataclass(frozen=True, slots=True)
class Status:
    """State of an installed job. `pid`: None if it is not running."""

    name: str
    pid: int | None
    last_exit: str


class Manager(Protocol):
    """launchd or systemd. All methods may raise `ServiceError` or `OSError`."""

    folder: Path
    """Folder of its files, which only their owner can read: variables may contain keys."""
    pattern: str
    """Glob pattern of our files."""

    def check(self) -> None:
        """Raise `ServiceError` if the manager cannot be reached, before anything is changed."""

    def acting(self) -> AbstractContextManager[None]:
        """Be the user whose processes the jobs will be, while their settings are read."""

    def files(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Return the texts of the files to install, by file name."""

    def load(self, names: Collection[str], changed: Collection[str]) -> None:
        """Run all installed jobs, and restart those whose files have `changed`."""

    def restart(self, name: str) -> None:
        """Stop a job, as long as it needs, and start it again; its socket stays open."""

    def unload(self, names: Collection[str]) -> None:
        """Stop jobs before their files are removed. Waits until they have ended."""

    def forget(self) -> None:
        """Clean up after files have been removed."""

    def leftovers(self) -> list[Path]:
        """Return the other files that the jobs have left on disk, folders last."""

    def statuses(self, names: Collection[str]) -> list[Status]: ...

    def hint(self) -> str:
        """Return the advice to print after an installation."""


class Run(Protocol):
    """Runner of the manager's commands. Raises `ServiceError` if a command is missing or times out."""

    def __call__(
        self, words: Sequence[str], within_s: float = COMMAND_S_MAX
    ) -> subprocess.CompletedProcess[str]: ...


def run_command(words: Sequence[str], within_s: float = COMMAND_S_MAX) -> subprocess.CompletedProcess[str]:
    """Run a command, as described in `Run`."""
    if shutil.which(words[0]) is None:
        raise ServiceError(f"{words[0]} is not installed on this machine")
    try:
        return subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{' '.join(words)} did not end within {within_s:g} s") from error


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Return a command's output. Raises `ServiceError` with its error output if it failed."""
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
        raise ServiceError(f"{' '.join(map(str, done.args))}: {reason}")
    return done.stdout
