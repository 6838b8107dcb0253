"""Who guesses what a set says: a draft model, or layers for multi-token prediction of the model's own.

The first rank guesses alone and tells all others what it tries, so these need not agree on a guess. A draft
model is its own affair altogether. Layers of the model's own go by what the model thinks: of that each rank
computes a part, so all must compute it, whether or not they have a use for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn

from worker.contract import ModelError
from worker.drafts import Drafter
from worker.models.drafting import DraftModel, find_draft, load_draft
from worker.models.heads import Opened, bytes_beside, open_heads, proven, say
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
        self._opened: Opened | None = None

    @property
    def has_model(self) -> bool:
        """A draft model guesses."""
        return bool(self._asked)

    def find(self) -> None:
        """The draft model's files. Raises `ModelError`, also for one that goes by what the model thinks."""
        if not self._asked:
            return
        self._found = find_draft(self._asked)
        if self._found.config is None:
            raise ModelError(
                f"{self._asked}: drafters trained for one model are not run in a set; name a language model."
            )

    def look(self, folder: Path, network: nn.Module) -> None:
        """At the model, before it is split: its own layers use all of its output layer."""
        if not self._uses_heads:
            return
        opened = open_heads(folder, network, self._name)
        self._tap = opened.tap if opened else None
        self._opened = opened if self._leads else None

    def weight_bytes(self, network: PartNetwork) -> int:
        """What it takes beside this rank's part of the model."""
        draft = self._found.weight_bytes if self._found else 0
        return draft + (bytes_beside(self._opened, network) if self._opened else 0)

    def load(self, folder: Path, part_bytes: int, split: Split, tokenizers: Tokenizers) -> None:
        """All of the draft model. `folder`, `part_bytes`, `tokenizers`: of the model. Raises `ModelError`."""
        config = self._found.config if self._found else None
        if self._found is None or config is None:
            return
        # What a token costs the set: of tensors each rank has a part, in a pipeline one waits for another.
        whole = split.mode == "pipeline"
        cost = bytes_of(weight_files(folder, self._name)) if whole else part_bytes
        self._draft = load_draft(self._found, config, cost, tokenizers.take(), Trials(self._trials))

    def drafter(self, split: Split, network: PartNetwork, *, ahead: bool) -> Drafter | None:
        """Who guesses on this rank. `ahead`: rows can be fed guesses, on all ranks. Waits for all."""
        heads = self._agreed(split, network, ahead=ahead) if self._uses_heads else None
        return self._draft or heads

    def _agreed(self, split: Split, network: PartNetwork, *, ahead: bool) -> Heads | None:
        if not split.agreed(ahead and self._tap is not None):
            return None
        network.listen(self._tap)
        said = say(network)
        heads = proven(self._opened, said, self._name) if self._opened else None
        if not split.agreed(heads is not None or self._opened is None):
            network.listen(None)
            return None
        return heads
