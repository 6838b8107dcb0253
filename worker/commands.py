"""What the I/O thread tells the model thread."""

from __future__ import annotations

from dataclasses import dataclass

from worker.contract import Prepared


@dataclass(frozen=True, slots=True)
class Submit:
    """A prepared request joins the queue."""

    request: Prepared


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for this request any more; None: for none of them."""

    id: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Submit | Drop | Stop
