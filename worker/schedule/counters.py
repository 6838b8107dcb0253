"""Status of the model thread, as reported in the heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.types import ImageStatus, PrefixStatus, RequestStatus, Resources, SpecDecodeStatus

TOLD_EVERY_S = 0.2
"""Interval in seconds at which the status of each row is refreshed."""


@dataclass(slots=True)
class Counters:
    """Counters that the model thread writes and the heartbeat reads. Values are replaced whole: no lock."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Number of steps that ran something."""
    starved: int = 0
    """Number of times a row made no progress."""
    cache_bytes: int = 0
    rows: list[RequestStatus] = field(default_factory=list)
    prefix: PrefixStatus | None = None
    device: Resources = field(default_factory=Resources)
    images: ImageStatus | None = None
    drafts: SpecDecodeStatus | None = None
