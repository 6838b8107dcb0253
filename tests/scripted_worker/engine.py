"""Scripted `Engine`: rows generate, delay, hang and crash as their prompts direct."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.scripted_worker.pictures import FakeSight
from tests.scripted_worker.script import Script
from worker.interfaces import DraftProposer, ImportanceScorer
from worker.values import (
    NO_DRAFTS,
    NO_EMBEDDINGS,
    NO_LAST,
    NO_TARGETS,
    ArrayBytes,
    CacheSegment,
    CacheSlice,
    CacheSpec,
    EncodedImage,
    ForcedTokens,
    ImageInput,
    Logprob,
    LogprobTargets,
    SamplingParams,
    StepOutput,
)

TOKEN_BYTES = 16
END = 0
WORDS = ("steam", "signal", "turntable", "wagon", "tender", "駅", "🚂", "boiler", "rails", "whistle")
"""Texts of the tokens, from 1 on."""
_METAL = "[METAL] Command buffer execution failed: Scripted (00000008:kIOGPUCommandBufferCallbackError{})."
"""As MLX raises it at eval."""


@dataclass(slots=True)
class FakeRow:
    """A started row. `fed`: a step has begun to sample its next token."""

    script: Script
    sampling: SamplingParams
    prompt_tokens: int
    drawn: int
    fed: bool = False


@dataclass(slots=True)
class FakeEngine:
    """Engine whose rows follow their scripts, which the preparers put into a shared mapping."""

    scripts: MutableMapping[str, Script]
    step_ms: float
    shape: CacheSpec | None = field(default_factory=CacheSpec)
    drafter: DraftProposer | None = None
    importance_scorer: ImportanceScorer | None = None
    can_skip_tokens: bool = False
    rows: dict[str, FakeRow] = field(default_factory=dict)
    sight: FakeSight = field(default_factory=FakeSight)

    def encode_image(self, image: ImageInput) -> EncodedImage:
        return self.sight.encode_image(image)

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        self.sight.set_images(row, images)

    def set_adapter(self, row: str, adapter: str) -> None:
        """Do nothing: scripts say the same with any adapter."""

    def expect_tokens(self, row: str, tokens: int) -> None:
        """Do nothing: scripts have no caches."""

    def prefill(
        self,
        chunks: Mapping[str, Sequence[int]],
        targets: Mapping[str, LogprobTargets] = NO_TARGETS,
        last: Mapping[str, int] = NO_LAST,
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
    ) -> Mapping[str, Sequence[Logprob]]:
        if any(self._script(row).burst for row in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(self._script(row).oom for row in chunks):
            raise MemoryError("scripted: out of memory")
        for row, tokens in chunks.items():
            self.sight.ran(row, tokens, embeddings)
        time.sleep(max(self._script(row).prefill_ms for row in chunks) / 1000)
        return {row: [_likelihood(token, of.top) for token in of.tokens] for row, of in targets.items()}

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        """Do nothing: rows have no caches."""

    def fork(self, row: str, copy: str) -> None:
        """Copy the images only: rows have no caches."""
        self.sight.copy(row, copy)

    def start(
        self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams
    ) -> StepOutput:
        script = self._script(row)
        if script.oom:
            raise MemoryError("scripted: out of memory")
        self.rows[row] = FakeRow(script, sampling, prompt_tokens, drawn=len(tokens) - prompt_tokens)
        return StepOutput({}, {})

    def _script(self, row: str) -> Script:
        return self.scripts.get(row, Script())

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        """Run a step; drafts are ignored."""
        pause_ms = max([self.step_ms, *(row.script.slow_ms for row in self.rows.values())])
        if pause_ms:
            time.sleep(pause_ms / 1000)
        drawn = {id: self._draw(row) for id, row in self.rows.items() if row.fed}
        for row in self.rows.values():
            row.fed = True
        asking = {id: self.rows[id].sampling.logprobs for id in drawn}
        return StepOutput(
            drawn, {id: _likelihood(drawn[id], top) for id, top in asking.items() if top is not None}
        )

    def _draw(self, row: FakeRow) -> int:
        script, number = row.script, row.drawn
        if number == script.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == script.hang:
            threading.Event().wait()
        if number == script.fail:
            raise RuntimeError("scripted: the step fails")
        if script.gpu and number == 2:
            raise RuntimeError(_METAL.format(script.gpu))
        if number >= script.tokens:
            return END
        row.drawn += 1
        seed = row.sampling.seed if row.sampling.temperature else 0
        return 1 + (seed + 7 * (row.prompt_tokens + number)) % len(WORDS)

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        return ForcedTokens()

    def drop(self, row: str) -> None:
        self.rows.pop(row, None)
        self.sight.drop(row)

    def reset(self) -> None:
        self.rows.clear()
        self.sight.clear()

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        """Return empty slices with a size by tokens: rows have no caches."""
        cuts = [
            CacheSlice((first, last), TOKEN_BYTES * (last - first), complete_from=first)
            for first, last in runs
        ]
        return cuts, CacheSlice((), TOKEN_BYTES) if states else None

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        self.sight.restored(row, sum(piece.count for piece in pieces))

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        return {"nothing": ArrayBytes("U8", (TOKEN_BYTES,), bytes(TOKEN_BYTES))}, payload

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        return CacheSlice(tuple(rest), TOKEN_BYTES)

    def cache_bytes(self) -> int:
        return sum(self.row_bytes(row.prompt_tokens + row.drawn) for row in self.rows.values())

    def row_bytes(self, tokens: int) -> int:
        return TOKEN_BYTES * tokens


def _likelihood(token: int, top: int) -> Logprob:
    """Return logprobs in which the sampled token is the most likely, followed by those after it by id."""
    others = [(token + n) % (len(WORDS) + 1) for n in range(top)]
    return Logprob(-0.5, tuple((other, -0.5 * (1 + n)) for n, other in enumerate(others)))
