"""Commands to the model thread from the I/O thread and the disk thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.core.memory_relief import Relief
from worker.core.prefix.folder import Record
from worker.values import EngineRequest, PreparedTexts


@dataclass(frozen=True, slots=True)
class Submit:
    """Add a tokenized request to the queue."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class SubmitTexts:
    """Add the tokenized texts of an embedding or rerank request to the queue."""

    request: PreparedTexts


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the request with this `id`."""

    id: str


@dataclass(frozen=True, slots=True)
class ClearPrefixes:
    """Clear the prefix cache; the reply to the gateway carries this `id`. `namespace`: as in `ClearCache`."""

    id: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class RelieveMemory:
    """Give back what this stage asks for, and keep to it until the next one."""

    relief: Relief


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records of stored prefixes read from the disk, by digest; None: not usable."""

    records: Mapping[str, Record | None]


@dataclass(frozen=True, slots=True)
class Written:
    """A stored prefix was written to the disk in `file_bytes` bytes; None: the write failed."""

    digest: str
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The disk tier has looked at the free space."""


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Load an adapter from a folder."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """Remove an adapter; requests that still use it fail."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = (
    Submit
    | SubmitTexts
    | Abort
    | ClearPrefixes
    | RelieveMemory
    | Fetched
    | Written
    | DiskSpace
    | AddAdapter
    | RemoveAdapter
    | Stop
)
