"""Cache of probe results, so that a model is not probed at each start: one small file per result.

A result is valid for a model's files, the library versions, the device and our own code; its key covers all
of these. Only complete results are stored, because the cause of a failed probe may be temporary. A file that
is damaged or has another key is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import mlx.core as mx
import msgspec

from protocol.types import Exactness
from worker import load, runner
from worker.input.media.preprocessing import ImagePlaceholders
from worker.load.fingerprint import fingerprint
from worker.runner.kv.capability_probe import BatchCapabilities

log = logging.getLogger(__name__)

FILES_MAX = 256
"""Maximum number of files; the oldest are removed first."""
_FILE_BYTES_MAX = 16384
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers")
_TOLD = ("*.json", "*.jinja")
"""Files of a model folder that a result depends on besides the weights: tokenizer, template, processor."""


Proven = TypeVar("Proven", BatchCapabilities, ImagePlaceholders, Exactness)


class _Proof(msgspec.Struct, Generic[Proven], frozen=True):
    """Content of a file."""

    key: str
    proven: Proven


_ABILITIES = msgspec.json.Decoder(_Proof[BatchCapabilities])
_FOUND = msgspec.json.Decoder(_Proof[ImagePlaceholders])
_EXACTNESS = msgspec.json.Decoder(_Proof[Exactness])


class ProbeCache:
    """Probe results in `folder`; None: no caching. Never raises because of the folder's contents."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def capabilities(self, key: str, prove: Callable[[], BatchCapabilities]) -> BatchCapabilities:
        """Return the cached batching capabilities of a network, or probe them."""
        return self._known(key, _ABILITIES, prove, _are_complete)

    def sight(self, key: str, prove: Callable[[], ImagePlaceholders]) -> ImagePlaceholders:
        """Return the cached image placeholders of a vision model, or probe them."""
        return self._known(f"{key}-sight", _FOUND, prove, lambda found: found.token_bytes > 0)

    def exactness(self, key: str, prove: Callable[[], Exactness]) -> Exactness:
        """Return the cached comparison of a model's passes, or measure it. One that ended for lack of time is
        cached as well, or each start would take that time."""
        return self._known(key, _EXACTNESS, prove, lambda found: bool(found.checks))

    def _known(
        self,
        key: str,
        decoder: msgspec.json.Decoder[_Proof[Proven]],
        prove: Callable[[], Proven],
        is_complete: Callable[[Proven], bool],
    ) -> Proven:
        if self._folder is None:
            return prove()
        file = self._folder / f"{key}.json"
        known = _read(file, key, decoder)
        if known is not None and is_complete(known):
            return known
        proven = prove()
        if is_complete(proven):
            self._keep(file, msgspec.json.encode(_Proof(key, proven)))
        return proven

    def _keep(self, file: Path, content: bytes) -> None:
        aside = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.write_bytes(content)
            aside.replace(file)
            _thin_out(file.parent)
        except OSError as error:
            log.debug("a probe result could not be stored: %s", error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def _are_complete(capabilities: BatchCapabilities) -> bool:
    """Return whether nothing failed in the probe."""
    proven = (
        capabilities.together,
        capabilities.padded,
        capabilities.restorable,
        capabilities.cut,
        capabilities.ahead,
    )
    return all(proven) and not capabilities.reasons


def key_of(folder: Path, weights: Iterable[Path], network: object) -> str:
    """Return the key of a model's results, 32 hexadecimal digits. `network`: the loaded model."""
    means = {name: metadata.version(name) for name in _LIBRARIES} | {
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}",
        "network": f"{type(network).__module__}.{type(network).__qualname__}",
        "ours": _digest(file for package in (runner, load) for file in _sources(package)),
        "theirs": _digest(file for suffix in _TOLD for file in sorted(folder.glob(suffix))),
    }
    return fingerprint(folder / "config.json", weights, means)


@cache
def _sources(package: ModuleType) -> list[Path]:
    """Return the source files of a package."""
    return sorted(Path(package.__path__[0]).rglob("*.py"))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: str, decoder: msgspec.json.Decoder[_Proof[Proven]]) -> Proven | None:
    """Return the stored result; None: there is no valid one."""
    try:
        with file.open("rb") as opened:
            proof = decoder.decode(opened.read(_FILE_BYTES_MAX))
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.debug("no stored probe result: %s", error)
        return None
    return proof.proven if proof.key == key else None


def _thin_out(folder: Path) -> None:
    """Remove the oldest files beyond `FILES_MAX`. Raises `OSError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-FILES_MAX]:
        file.unlink(missing_ok=True)
