"""Options of a load, by which a worker's settings reach its loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from protocol.adapters import split_setting
from protocol.settings.parsers import RECOGNIZED, NamedParsers
from protocol.settings.worker import WorkerSettings
from protocol.tasks import Task
from protocol.types import Wired
from worker.values import KVQuantization, kv_quantization_of

if TYPE_CHECKING:
    from worker.load.exactness import ExactnessUse


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded."""

    served_name: str | None = None
    """Its name for clients; None: its own."""
    memory_headroom: float = 0.1
    """Share of the memory to keep free."""
    memory_limit_bytes: int | None = None
    """Replaces the machine's memory."""
    memory_budget: int | None = None
    """The process's most bytes."""
    wired: Wired = "weights"
    """What macOS may not page out."""
    task: Task | None = None
    """Overrides the detected task."""
    text_only: bool = False
    """Serve a vision model without images."""
    parsers: NamedParsers = RECOGNIZED
    """The formats of its output, if named."""
    stands_in: bool = False
    """It replaces another model, so its plan gets a name."""
    draft_model: str | None = None
    """Folder or id of a draft model; without one, the model's own MTP layers draft, if any."""
    speculation: Literal["auto", "off"] | None = None
    """Whether to draft; None: where the model has a drafter, its own or a draft model."""
    exactness: ExactnessUse = "none"
    """Whether to measure which passes are exact, or to keep to those that were measured to be."""
    exactness_folder: Path | None = None
    """Where that is kept."""
    adapters: Sequence[tuple[str, Path]] = ()
    """Names and folders."""
    kv_quantization: KVQuantization | None = None
    """How its KV caches are quantized; None: not."""
    experts_memory: int | None = None
    """Bytes of experts in memory; the others are read from disk when needed."""
    probe_folder: Path | None = None
    """Where results of probes are kept."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> LoadOptions:
        """Return the options that settings name; folders are left out."""
        return cls(
            served_name=settings.served_name,
            memory_headroom=settings.memory_headroom,
            memory_limit_bytes=settings.memory_limit_bytes,
            memory_budget=settings.memory_budget,
            wired=settings.wired,
            task=settings.task,
            text_only=settings.text_only,
            parsers=NamedParsers(settings.tool_call_parser, settings.reasoning_parser),
            stands_in=settings.stands_in,
            draft_model=settings.draft_model,
            speculation=settings.speculation,
            exactness="limits" if settings.exact else "none",
            adapters=[pair for word in settings.adapters if (pair := split_setting(word)) is not None],
            kv_quantization=kv_quantization_of(settings),
            experts_memory=settings.experts_memory,
        )
