"""Changes of the file of API keys. Each replaces the file, so that the gateway never reads half of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.serving.resolution import resolve_gateway
from deploy.serving.settings import default_keys_file
from protocol.common import api_keys
from protocol.common.api_keys import ApiKey, KeysError
from protocol.common.secure_files import read_private, replace_private

HEADER = b"# API keys of Roundhouse: hashes, made by `roundhouse keys`\n"


def path_of(file: Path | None, config: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the file of `--file`, or of the settings of `serve`, or else in the user's configuration folder.

    Raises `SettingsError`, or `KeysError` without such a folder.
    """
    flags = [] if config is None else [f"--config={config}"]
    path = file or resolve_gateway(flags, environ).api_keys_file or default_keys_file(environ)
    if path is None:
        raise KeysError("there is no configuration folder: give --file, or set HOME")
    return path.resolve()


def keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys in the file. Raises `KeysError` or `OSError`."""
    return api_keys.parse(read_private(path), str(path))


def create(path: Path, name: str, concurrent_max: int | None) -> str:
    """Add a new key, whose text is returned and not stored. Raises `KeysError` or `OSError`."""
    text, key = api_keys.create(name, concurrent_max)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _exclusive(path):
        before = read_private(path) if path.exists() else HEADER
        if path.exists():
            api_keys.parse(before, str(path))  # refuse what the gateway would refuse
        replace_private(path, b"\n".join([before.rstrip(b"\n"), key.line.encode(), b""]))
    return text


def revoke(path: Path, which: str) -> list[ApiKey]:
    """Remove the keys of this name or id, and return them. Raises `KeysError` or `OSError`."""
    with _exclusive(path):
        content, removed = api_keys.without(read_private(path), which, str(path))
        replace_private(path, content)
    return removed


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file: a revoked key must not come back with their copy."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise KeysError(f"{path} is being changed by another command; try again") from None
    finally:
        os.close(folder)
