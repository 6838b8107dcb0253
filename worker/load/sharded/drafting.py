"""Speculative decoding in a sharded model: a draft model, or the model's own MTP layers.

Only the first rank drafts, and it sends its drafts to the others, so ranks need not agree on them. It runs a
draft model entirely by itself. MTP layers read the model's hidden states, of which each rank computes a part:
so all ranks must compute them, even those that do not use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn

from worker.interfaces import DraftProposer, ModelError
from worker.load.drafters.draft_model import DraftModel, find_draft, load_draft
from worker.load.drafters.mtp_layers import MtpLayers, bytes_beside, open_heads, proven, say
from worker.load.probes.cache import ProbeCache
from worker.load.sharded.parallelism import ShardGroup, ShardNetwork
from worker.load.source import bytes_of, weight_files
from worker.load.tokenizers import Tokenizers

if TYPE_CHECKING:
    from worker.runner.drafters.draft_model import DraftModelProposer
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
    from worker.runner.drafters.hidden_states import Tap


class ShardDrafting:
    """Drafter of one rank. `name`: the model's. `draft_model`: given on the first rank only. `use_mtp`: the
    same on all ranks. `is_leader`: this is the first rank. `probe_cache_folder`: as for `ModelLoader`."""

    def __init__(
        self,
        name: str,
        *,
        draft_model: str | None,
        use_mtp: bool,
        is_leader: bool,
        probe_cache_folder: Path | None,
    ) -> None:
        self._name = name
        self._asked = draft_model
        self._use_mtp = use_mtp
        self._is_leader = is_leader
        self._probe_cache_folder = probe_cache_folder
        self._found: DraftModel | None = None
        self._draft: DraftModelProposer | None = None
        self._tap: Tap | None = None
        self._opened: MtpLayers | None = None

    @property
    def has_model(self) -> bool:
        """Whether a draft model is used."""
        return bool(self._asked)

    def find(self) -> None:
        """Find the draft model's files. Raises `ModelError`, also for a trained drafter."""
        if not self._asked:
            return
        self._found = find_draft(self._asked)
        if self._found.config is None:
            raise ModelError(
                f"{self._asked}: trained drafters are not run in a set; choose a language model."
            )

    def inspect_folder(self, folder: Path, network: nn.Module) -> None:
        """Load the MTP layers before the model is split, because they use its whole output layer."""
        if not self._use_mtp:
            return
        opened = open_heads(folder, network, self._name)
        self._tap = opened.tap if opened else None
        self._opened = opened if self._is_leader else None

    def weight_bytes(self, network: ShardNetwork) -> int:
        """Return the bytes of the drafter, besides this rank's shard of the model."""
        draft = self._found.weight_bytes if self._found else 0
        return draft + (bytes_beside(self._opened, network) if self._opened else 0)

    def load(self, folder: Path, shard_bytes: int, split: ShardGroup, tokenizers: Tokenizers) -> None:
        """Load the draft model, if any. `folder`, `shard_bytes`, `tokenizers`: of the target. Raises
        `ModelError`."""
        config = self._found.config if self._found else None
        if self._found is None or config is None:
            return
        # Cost of a token: with tensor parallelism ranks work at once, in a pipeline one after another.
        whole = split.mode == "pipeline"
        cost = bytes_of(weight_files(folder, self._name)) if whole else shard_bytes
        self._draft = load_draft(
            self._found, config, cost, tokenizers.take(), ProbeCache(self._probe_cache_folder)
        )

    def drafter(self, split: ShardGroup, network: ShardNetwork, *, can_verify: bool) -> DraftProposer | None:
        """Return this rank's drafter. `can_verify`: all ranks can verify drafts. Waits for all ranks."""
        heads = self._agreed(split, network, can_verify=can_verify) if self._use_mtp else None
        return self._draft or heads

    def _agreed(
        self, split: ShardGroup, network: ShardNetwork, *, can_verify: bool
    ) -> HiddenStateProposer | None:
        if not split.agreed(can_verify and self._tap is not None):
            return None
        network.listen(self._tap)
        said = say(network)
        heads = proven(self._opened, said, self._name) if self._opened else None
        if not split.agreed(heads is not None or self._opened is None):
            network.listen(None)
            return None
        return heads
