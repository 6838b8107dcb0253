"""Scripted adapters: a folder is an adapter unless its name has `broken` in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from protocol.types import AdapterInfo
from worker.interfaces import AdapterError

NBYTES = 1000


@dataclass(slots=True)
class FakeAdapters:
    """`AdapterSet` without weights."""

    infos: list[AdapterInfo] = field(default_factory=list)

    def load(self, name: str, folder: Path, bytes_max: int) -> AdapterInfo:
        if "broken" in folder.name:
            raise AdapterError("it has no adapter_config.json that can be read")
        if any(info.name == name for info in self.infos):
            raise AdapterError("it is loaded already")
        if bytes_max < NBYTES:
            raise AdapterError("it is too large")
        digest = hashlib.sha256(folder.name.encode()).hexdigest()[:32]
        info = AdapterInfo(name=name, digest=digest, rank=8, bytes=NBYTES, folder=str(folder))
        self.infos = [*self.infos, info]
        return info

    def unload(self, name: str) -> None:
        self.infos = [info for info in self.infos if info.name != name]
