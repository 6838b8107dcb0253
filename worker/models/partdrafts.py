"""Who guesses what a set says: a draft model, or layers for multi-token prediction of the model's own.

The first rank guesses alone and tells all others what it tries, so these need not agree on a guess. A draft
model is its own affair altogether. Layers of the model's own go by what the model thinks: of that each rank
computes a part, so all must compute it, whether or not they have a use for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn

from worker.drafts import Drafter
from worker.models.drafting import DraftModel, find_draft, load_draft
from worker.models.heads import bytes_beside, is_heard, open_heads, try_pass
from worker.models.source import bytes_of, weight_files
from worker.models.split import PartNetwork, Split
from worker.models.tokenizers import Tokenizers
from worker.models.trials import Trials

if TYPE_CHECKING:
    from worker.engine.following import Followers
    from worker.engine.heads import Heads
    from worker.engine.hearing import Tap


class PartDrafts:
    """Of one rank. `name` is the model's. `draft_model`: of the first rank alone. `uses_heads`: of all ranks,
    or of none. `trials`: as for `ModelLoader`."""

    def __init__(
        self, name: str, *, draft_model: str | None, uses_heads: bool, leads: bool, trials: Path | None
    ) -> None:
        self._name = name
        self._asked = draft_model
        self._uses_heads = uses_heads
        self._leads = leads
        self._trials = trials
        self._found: DraftModel | None = None
        self._draft: Followers | None = None
        self._tap: Tap | None = None
        self._heads: Heads | None = None

    @property
    def has_model(self) -> bool:
        """A draft model guesses."""
        return bool(self._asked)

    def find(self) -> None:
        """The draft model's files. Raises `ModelError`."""
        self._found = find_draft(self._asked) if self._asked else None

    def look(self, folder: Path, network: nn.Module) -> None:
        """At the model, before it is split: its own layers use all of its output layer."""
        if not self._uses_heads:
            return
        heads = open_heads(folder, network, self._name)
        self._tap = heads.tap if heads else None
        self._heads = heads if self._leads else None

    def weight_bytes(self, network: PartNetwork) -> int:
        """What it takes beside this rank's part of the model."""
        draft = self._found.weight_bytes if self._found else 0
        return draft + (bytes_beside(self._heads, network) if self._heads else 0)

    def load(self, folder: Path, part_bytes: int, split: Split, tokenizers: Tokenizers) -> None:
        """All of the draft model. `folder`, `part_bytes`, `tokenizers`: of the model. Raises `ModelError`."""
        if self._found is None:
            return
        # What a token costs the set: of tensors each rank has a part, in a pipeline one waits for another.
        whole = split.mode == "pipeline"
        cost = bytes_of(weight_files(folder, self._name)) if whole else part_bytes
        self._draft = load_draft(self._found, cost, tokenizers.take(), Trials(self._trials))

    def drafter(self, split: Split, network: PartNetwork, *, ahead: bool) -> Drafter | None:
        """Who guesses on this rank. `ahead`: rows can be fed guesses, on all ranks. Waits for all."""
        if self._uses_heads and not self._agreed(split, network, ahead=ahead):
            network.listen(None)
            self._heads = None
        return self._draft or self._heads

    def _agreed(self, split: Split, network: PartNetwork, *, ahead: bool) -> bool:
        if not split.agreed(ahead and self._tap is not None):
            return False
        network.listen(self._tap)
        said = try_pass(network)
        return split.agreed(self._heads is None or is_heard(self._heads, said, self._name))
