"""Lock of a server's state (`state_folder.server_name`): one process owns it, and says which it is.

The supervisor holds the lock, or a gateway without one, as long as it lives. The operating system releases it
when the process ends, however that happens, so a lock file of a dead process hinders nobody. Its content is
for messages only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from protocol.common.secure_files import lock_file
from protocol.common.state_folder import server_name
from protocol.sockets import EndpointError, runtime_directory

_SUFFIX = ".lock"
OWNER_BYTES_MAX = 4096
TRIES_MAX = 10
"""The file of an owner that has just ended is replaced; each try opens it anew."""


class Owner(Struct, frozen=True):
    """The process that owns a server's state. `since`: in seconds since 1970."""

    program: str
    host: str
    port: int
    pid: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.program} on {self.host}, pid {self.pid}, since {since}"

    @property
    def runs(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


class OwnedError(Exception):
    """Raised if another process owns the state. The message names it."""


class ServerLock:
    """The lock of a server's state, held until `release` or the end of this process."""

    def __init__(self, program: str, host: str, port: int) -> None:
        """Take the lock. Raises `OwnedError`, `EndpointError` or `OSError`."""
        self._path = runtime_directory() / f"{server_name(host, port)}{_SUFFIX}"
        for _ in range(TRIES_MAX):
            self._lock = lock_file(self._path, os.O_CREAT)
            if self._lock is not None:
                break
            if (owner := _read(self._path)) is not None and owner.runs:
                raise OwnedError(str(owner))
        else:
            raise OwnedError(f"another process, which has locked {self._path}")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, msgspec.json.encode(Owner(program, host, port, os.getpid(), time.time())), 0)

    def release(self) -> None:
        """Give the state up; may be called again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._path.unlink(missing_ok=True)
            os.close(lock)


def running_servers() -> str:
    """Return which servers of this user run, as the end of a message about one that was not found."""
    try:
        files = sorted(runtime_directory().glob(f"*{_SUFFIX}"))
    except (EndpointError, OSError):
        return ""
    owners = [owner for file in files if (owner := _read(file)) is not None and owner.runs]
    found = ", ".join(f"{flags(owner.host, owner.port)} (pid {owner.pid})" for owner in owners)
    return f"; running: {found}" if found else ""


def flags(host: str, port: int) -> str:
    """Return the flags by which a command finds a server."""
    return f"--port {port}" if server_name(host, port) == str(port) else f"--host {host} --port {port}"


def _read(path: Path) -> Owner | None:
    """Return the owner in a lock file; None: there is none, or it has not written its name yet."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(OWNER_BYTES_MAX), type=Owner)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
