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
from types import ModuleType
from typing import Generic, TypeVar

import mlx.core as mx
import msgspec

from worker import engine, models
from worker.engine.caches.trial import Abilities
from worker.models.eyes import Found
from worker.models.fingerprint import fingerprint

log = logging.getLogger(__name__)

FILES_MAX = 256
"""Beyond them the eldest are removed."""
_FILE_BYTES_MAX = 4096
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers")
_TOLD = ("*.json", "*.jinja")
"""What a folder says of its model besides the weights: tokenizer, template, how images are prepared."""


Proven = TypeVar("Proven", Abilities, Found)


class _Proof(msgspec.Struct, Generic[Proven], frozen=True):
    """The content of a file."""

    key: str
    proven: Proven


_ABILITIES = msgspec.json.Decoder(_Proof[Abilities])
_FOUND = msgspec.json.Decoder(_Proof[Found])


class Trials:
    """The proofs in `folder`; None: nothing is remembered. Never raises anything for what is in there."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def abilities(self, key: str, prove: Callable[[], Abilities]) -> Abilities:
        """Of a network's rows, as they were proven before or, by `prove`, are now."""
        return self._known(key, _ABILITIES, prove, _are_complete)

    def sight(self, key: str, prove: Callable[[], Found]) -> Found:
        """Of a model that was seen to see as it should."""
        return self._known(f"{key}-sight", _FOUND, prove, lambda found: found.token_bytes > 0)

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
            log.debug("a trial is not remembered: %s", error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def _are_complete(abilities: Abilities) -> bool:
    """Nothing was refused, for whatever reason."""
    proven = abilities.together, abilities.padded, abilities.restorable, abilities.cut, abilities.ahead
    return all(proven) and not abilities.reasons


def key_of(folder: Path, weights: Iterable[Path], network: object) -> str:
    """What a proof is found by: 32 hexadecimal digits. `network`: what the files were loaded into."""
    means = {name: metadata.version(name) for name in _LIBRARIES} | {
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}",
        "network": f"{type(network).__module__}.{type(network).__qualname__}",
        "ours": _digest(file for package in (engine, models) for file in _sources(package)),
        "theirs": _digest(file for suffix in _TOLD for file in sorted(folder.glob(suffix))),
    }
    return fingerprint(folder / "config.json", weights, means)


@cache
def _sources(package: ModuleType) -> list[Path]:
    """All our code that a proof is about."""
    return sorted(Path(package.__path__[0]).rglob("*.py"))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: str, decoder: msgspec.json.Decoder[_Proof[Proven]]) -> Proven | None:
    """None: there is nothing that can be believed."""
    try:
        with file.open("rb") as opened:
            proof = decoder.decode(opened.read(_FILE_BYTES_MAX))
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.debug("no trial is remembered: %s", error)
        return None
    return proof.proven if proof.key == key else None


def _thin_out(folder: Path) -> None:
    """Raises `OSError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-FILES_MAX]:
        file.unlink(missing_ok=True)
