"""A delegating engine: every call of `worker.contract.engine.Engine` goes to another engine.

Each method is written out with its types, so that the type checker compares the wrapper with the contract. A
`__getattr__` would hide a parameter added to the contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.contract.drafts import NO_DRAFTS, DraftProposer, ImportanceScorer
from worker.contract.engine import (
    NO_TARGETS,
    CacheSegment,
    CacheSlice,
    CacheSpec,
    Engine,
    Logprob,
    LogprobTargets,
    SamplingParams,
    StepOutput,
)
from worker.contract.guides import ForcedTokens
from worker.contract.images import ArrayBytes, ImageInput


@dataclass(slots=True)
class EngineWrapper:
    """`Engine` that delegates to `engine`. Subclasses override what they change."""

    engine: Engine

    @property
    def shape(self) -> CacheSpec | None:
        return self.engine.shape

    @shape.setter
    def shape(self, shape: CacheSpec | None) -> None:
        self.engine.shape = shape

    @property
    def drafter(self) -> DraftProposer | None:
        return self.engine.drafter

    @drafter.setter
    def drafter(self, drafter: DraftProposer | None) -> None:
        self.engine.drafter = drafter

    @property
    def importance_scorer(self) -> ImportanceScorer | None:
        return self.engine.importance_scorer

    @importance_scorer.setter
    def importance_scorer(self, importance_scorer: ImportanceScorer | None) -> None:
        self.engine.importance_scorer = importance_scorer

    @property
    def can_skip_tokens(self) -> bool:
        return self.engine.can_skip_tokens

    @can_skip_tokens.setter
    def can_skip_tokens(self, can_skip_tokens: bool) -> None:
        self.engine.can_skip_tokens = can_skip_tokens

    def encode_image(self, image: ImageInput) -> int:
        return self.engine.encode_image(image)

    def evict_image(self, digest: str) -> None:
        self.engine.evict_image(digest)

    def set_adapter(self, row: str, adapter: str) -> None:
        self.engine.set_adapter(row, adapter)

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        self.engine.set_images(row, tokens, images)

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, LogprobTargets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Logprob]]:
        return self.engine.prefill(chunks, targets)

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        self.engine.skip_tokens(row, first, last)

    def fork(self, row: str, copy: str) -> None:
        self.engine.fork(row, copy)

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams) -> None:
        self.engine.start(row, tokens, prompt_tokens, sampling)

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        return self.engine.step(drafts)

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        return self.engine.forced_tokens(row, most)

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        return self.engine.copy_cache(row, runs, states=states)

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        self.engine.restore(row, pieces, states)

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        return self.engine.pack(payload)

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        return self.engine.unpack(blobs, rest)

    def cached_tokens(self, row: str) -> int:
        return self.engine.cached_tokens(row)

    def quantize_cache(self, row: str) -> None:
        self.engine.quantize_cache(row)

    def drop(self, row: str) -> None:
        self.engine.drop(row)

    def reset(self) -> None:
        self.engine.reset()

    def cache_bytes(self) -> int:
        return self.engine.cache_bytes()

    def row_bytes(self, tokens: int, *, quantized: bool = False) -> int:
        return self.engine.row_bytes(tokens, quantized=quantized)
