"""What was proven of models before, so that it need not be proven at each start: a small file for each.

A proof holds for a model's files, the versions of the libraries, the device, and our own code: all of these
are in its key. Only what was proven completely is kept: what a model was refused may have had a cause that is
gone. A file that is damaged, or another's, is as good as none.
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

import mlx.core as mx
import msgspec

from worker import engine
from worker.engine.caches.proof import Abilities
from worker.models.fingerprint import fingerprint

log = logging.getLogger(__name__)

FILES_MAX = 256
"""Beyond them the eldest are removed."""
_FILE_BYTES_MAX = 4096
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm")


class _Proof(msgspec.Struct, frozen=True):
    """The content of a file."""

    key: str
    abilities: Abilities


class Trials:
    """The proofs in `folder`; None: nothing is remembered. Never raises anything for what is in there."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def abilities(self, key: str, prove: Callable[[], Abilities]) -> Abilities:
        """As it was proven before or, by `prove`, is now."""
        if self._folder is None:
            return prove()
        file = self._folder / f"{key}.json"
        if (known := _read(file, key)) is not None:
            return known
        abilities = prove()
        if abilities.are_complete:
            self._keep(file, _Proof(key, abilities))
        return abilities

    def _keep(self, file: Path, proof: _Proof) -> None:
        aside = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode(proof))
            aside.replace(file)
            _thin_out(file.parent)
        except OSError as error:
            log.debug("a trial is not remembered: %s", error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def key_of(folder: Path, weights: Iterable[Path], network: object) -> str:
    """What a proof is found by: 32 hexadecimal digits. `network`: what the files were loaded into."""
    means = {name: metadata.version(name) for name in _LIBRARIES} | {
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}",
        "network": f"{type(network).__module__}.{type(network).__qualname__}",
        "ours": _own_digest(),
    }
    return fingerprint(folder / "config.json", weights, means)


@cache
def _own_digest() -> str:
    """Of all our code that a proof is about."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(engine.__path__[0]).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: str) -> Abilities | None:
    """None: there is nothing that can be believed."""
    try:
        with file.open("rb") as opened:
            proof = msgspec.json.decode(opened.read(_FILE_BYTES_MAX), type=_Proof)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.debug("no trial is remembered: %s", error)
        return None
    return proof.abilities if proof.key == key and proof.abilities.are_complete else None


def _thin_out(folder: Path) -> None:
    """Raises `OSError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-FILES_MAX]:
        file.unlink(missing_ok=True)
