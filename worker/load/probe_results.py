"""Results of probes, kept between starts: one small file each.

A result is valid for a model's files, the versions of the libraries and of this program, and the device; its
key covers all of these. A file that is damaged or has another key is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import msgspec

from worker.load.source import fingerprint

log = logging.getLogger(__name__)

FILES_MAX = 256
"""Maximum number of files; the oldest are removed first."""
LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "mlx-roundhouse")
_TOLD = ("*.json", "*.jinja")
"""Files of a model folder that a result depends on besides the weights: tokenizer, template, processor."""

Result = TypeVar("Result")


class ProbeResults:
    """Results in `folder`; None: none are kept. Never raises because of the folder's contents."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str, kind: type[Result]) -> Result | None:
        """Return the result under `key`; None: there is no valid one."""
        if self._folder is None:
            return None
        try:
            named, content = msgspec.json.decode(self._file(key).read_bytes(), type=tuple[str, msgspec.Raw])
            result = msgspec.json.decode(content, type=kind)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.debug("no stored probe result: %s", error)
            return None
        return result if named == key else None

    def write(self, key: str, result: object) -> None:
        if self._folder is None:
            return
        file = self._file(key)
        aside = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode((key, result)))
            aside.replace(file)
            files = sorted(file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-FILES_MAX]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.debug("a probe result could not be stored: %s", error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        assert self._folder is not None, "the caller has checked it"
        return self._folder / f"{key}.json"


def key_of(folder: Path, weights: Iterable[Path], network: object, *settings: str) -> str:
    """Return the key of a model's results, 32 hexadecimal digits. `network`: the loaded model. `settings`:
    what else a result depends on, and which result it is."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (file for suffix in _TOLD for file in sorted(folder.glob(suffix))):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    means = {name: metadata.version(name) for name in LIBRARIES} | {
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}",
        "network": f"{type(network).__module__}.{type(network).__qualname__}",
        "files": digest.hexdigest(),
        "settings": repr(settings),
    }
    return fingerprint(folder / "config.json", weights, means)
