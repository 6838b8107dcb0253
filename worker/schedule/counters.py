"""What the heartbeat tells of the model thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.parts import DraftStatus, ImageStatus, PrefixStatus, Resources, RowStatus

TOLD_EVERY_S = 0.2
"""How often the heartbeat gets to know each row anew."""


@dataclass(slots=True)
class Counters:
    """Written by the model thread, read by the heartbeat: replaced as a whole, so no lock is needed."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    cache_bytes: int = 0
    rows: list[RowStatus] = field(default_factory=list)
    prefix: PrefixStatus | None = None
    device: Resources = field(default_factory=Resources)
    images: ImageStatus | None = None
    drafts: DraftStatus | None = None
