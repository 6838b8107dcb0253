"""What a model's rows are able to do, all that `trial` can prove of it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.nn as nn

from worker.contract import Shape
from worker.engine.caches.trial import can_decode_together, can_prefill_together, restorable_shape


@dataclass(frozen=True, slots=True)
class Abilities:
    """`batchable`: rows share a forward pass. `paddable`: prompts do, too. `shape`: what must be stored of a
    row; None: it cannot be made again."""

    batchable: bool
    paddable: bool
    shape: Shape | None

    @property
    def are_complete(self) -> bool:
        """Nothing has been refused, for whatever reason."""
        return self.batchable and self.paddable and self.shape is not None


def prove(model: nn.Module) -> Abilities:
    """By trying. Takes a few dozen forward passes."""
    batchable = can_decode_together(model)
    return Abilities(batchable, batchable and can_prefill_together(model), restorable_shape(model))
