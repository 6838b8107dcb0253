"""What the I/O thread and the disk's tell the model thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.contract import Prepared
from worker.prefixes.files import Record
from worker.texts import PreparedTexts


@dataclass(frozen=True, slots=True)
class Submit:
    """A prepared request joins the queue."""

    request: Prepared


@dataclass(frozen=True, slots=True)
class Encode:
    """Prepared texts join the queue."""

    request: PreparedTexts


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for this request any more; None: for none of them."""

    id: str | None


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget every stored prefix; the answer to the gateway bears this `id`."""

    id: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the disk had of stored prefixes, by digest; None: nothing that can be used."""

    records: Mapping[str, Record | None]


@dataclass(frozen=True, slots=True)
class Written:
    """A stored prefix is on the disk now, in so many bytes; None: it could not be written."""

    digest: str
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Submit | Encode | Drop | Clear | Fetched | Written | Stop
