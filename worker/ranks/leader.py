"""Engine over all ranks, used by the leader's loop: each call is sent to the followers, then executed here.

Calls carry plain values and are executed in order, so all ranks have the same rows. Cache slices stay on
their rank, under a number; a `Handle` refers to all parts of a slice. Cache sizes are those of this rank,
which `ModelInfo.cache_bytes_max` takes into account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from worker.interfaces import DraftProposer, Engine, ImportanceScorer
from worker.process.device_errors import raise_if_device_failed
from worker.ranks import rpc
from worker.ranks.line import RankGoneError
from worker.values import (
    NO_DRAFTS,
    NO_EMBEDDINGS,
    NO_LAST,
    NO_TARGETS,
    ArrayBytes,
    CacheSegment,
    CacheSlice,
    EncodedImage,
    ForcedTokens,
    ImageInput,
    Logprob,
    LogprobTargets,
    SamplingParams,
    StepOutput,
)


class Caller(Protocol):
    """The used part of `LeaderLine`."""

    def call(self, called: rpc.Call) -> None: ...


class Handle:
    """Payload of a `CacheSlice`: the number of a slice on every rank. `payload`: this rank's part."""

    def __init__(self, number: int, payload: object, let_go: deque[int]) -> None:
        self.number, self.payload = number, payload
        self._let_go = let_go

    def __del__(self) -> None:
        # May run on any thread: the followers are informed with the next call.
        self._let_go.append(self.number)


class Leader:
    """`Engine` over all ranks."""

    def __init__(self, engine: Engine, line: Caller) -> None:
        """`engine`: this rank's engine."""
        self._engine = engine
        self._line = line
        self._cuts = 0
        self._let_go: deque[int] = deque()
        self.shape = engine.shape
        self.drafter: DraftProposer | None = None
        self.importance_scorer: ImportanceScorer | None = None
        self.can_skip_tokens = False

    @contextmanager
    def _together(self, called: rpc.Call) -> Iterator[None]:
        """Send `called`, then run the body. Any failure here raises `RankGoneError`, as the followers' state
        is then unknown."""
        self._tell(called)
        try:
            yield
        except Exception as error:
            raise_if_device_failed(error)
            raise RankGoneError(f"{type(called).__name__} failed on this rank: {error!r}") from error

    def _tell(self, called: rpc.Call) -> None:
        numbers = []
        while self._let_go:
            numbers.append(self._let_go.popleft())
        if numbers:
            self._line.call(rpc.Release(numbers))
        self._line.call(called)

    # --- what is for one process alone, and never called ---

    def encode_image(self, image: ImageInput) -> EncodedImage:
        raise AssertionError("several ranks do not support images")

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        raise AssertionError("several ranks do not support images")

    def set_adapter(self, row: str, adapter: str) -> None:
        raise AssertionError("several ranks do not support adapters")

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        raise AssertionError("several ranks do not support sparse prefill")

    # --- rows ---

    def prefill(
        self,
        chunks: Mapping[str, Sequence[int]],
        targets: Mapping[str, LogprobTargets] = NO_TARGETS,
        last: Mapping[str, int] = NO_LAST,
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
    ) -> Mapping[str, Sequence[Logprob]]:
        with self._together(rpc.Prefill(rpc.lists(chunks), dict(targets), dict(last))):
            return self._engine.prefill(chunks, targets, last)

    def expect_tokens(self, row: str, tokens: int) -> None:
        with self._together(rpc.Expect(row, tokens)):
            self._engine.expect_tokens(row, tokens)

    def fork(self, row: str, copy: str) -> None:
        with self._together(rpc.Fork(row, copy)):
            self._engine.fork(row, copy)

    def start(
        self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams
    ) -> StepOutput:
        """Start the row. A grammar may fail on this rank alone; the row is then dropped on all ranks."""
        plain = replace(sampling, grammar=None, logprobs=None)
        self._tell(rpc.StartRow(row, list(tokens), prompt_tokens, plain, sampling.grammar is not None))
        return self._engine.start(row, tokens, prompt_tokens, sampling)

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        with self._together(rpc.RunStep(rpc.lists(drafts))):
            return self._engine.step(drafts)

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        """Return forced tokens. Only this rank has the grammars; drafts made of them go to all ranks."""
        return self._engine.forced_tokens(row, most)

    def drop(self, row: str) -> None:
        with self._together(rpc.DropRow(row)):
            self._engine.drop(row)

    def reset(self) -> None:
        with self._together(rpc.Reset()):
            self._engine.reset()

    # --- stored cache slices ---

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        with self._together(rpc.CutOut(row, list(runs), states, self._cuts)):
            cuts, state = self._engine.copy_cache(row, runs, states=states)
        handled = [self._handled(cut) for cut in cuts]
        return handled, None if state is None else self._handled(state)

    def _handled(self, cut: CacheSlice) -> CacheSlice:
        number, self._cuts = self._cuts, self._cuts + 1
        return replace(cut, payload=Handle(number, cut.payload, self._let_go))

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        own = [replace(piece, payload=_handle(piece.payload).payload) for piece in pieces]
        told = [(_handle(p.payload).number, p.first, p.last, p.count) for p in pieces]
        state = None if states is None else _handle(states)
        number, payload = (None, None) if state is None else (state.number, state.payload)
        with self._together(rpc.Restore(row, told, number)):
            self._engine.restore(row, own, payload)

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        """Never called: several ranks have no prefix cache on disk."""
        raise AssertionError("several ranks do not store prefixes on disk")

    def allocate(self, nbytes: int) -> memoryview:
        """Never called, as `pack`."""
        raise AssertionError("several ranks do not store prefixes on disk")

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        """Never called, as `pack`."""
        raise AssertionError("several ranks do not store prefixes on disk")

    # --- cache sizes of this rank ---

    def cache_bytes(self) -> int:
        return self._engine.cache_bytes()

    def row_bytes(self, tokens: int) -> int:
        return self._engine.row_bytes(tokens)


def _handle(payload: object) -> Handle:
    assert isinstance(payload, Handle), "not a slice of these ranks"
    return payload
