"""Record of a row in the engine: all that the runner knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from worker.runner.kv.batch import RowCaches
from worker.runner.lora import NO_ADAPTER
from worker.runner.sampling.state import SamplingState


@dataclass(slots=True, eq=False)
class EngineRow:
    """A row of the engine: its prompt is run in caches of its own, and once it is started, it joins a decode
    batch."""

    name: str
    caches: RowCaches
    """Caches of its own, while it is in no batch."""
    tokens: int = 0
    """Number of tokens of the prompt that have been run."""
    expected: int = 0
    """Number of tokens that it will be prefilled with; 0: unknown."""
    adapter: str = NO_ADAPTER
    logits: mx.array | None = None
    """Logits behind the prompt's last token, [1, vocabulary], if it has been fed."""

    # --- once it is started ---

    sampling: SamplingState = field(init=False)
    length: int = 0
    """Number of tokens of its sequence, with the pending one, which its caches lack; 0: it is not started."""
    token: mx.array | None = None
    """The pending token, [1] uint32, while it is in no batch."""
    shift: int = 0
    """See `VisionNetwork`."""
    dropped: bool = False
