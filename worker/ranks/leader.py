"""The engine of a set, as its first rank's loop sees it: every call is passed on, then run here.

What is passed on are plain values, in the order of the calls, so all ranks hold the same rows. What is cut
out of rows stays on each rank, under a number; a `Handle` stands for all of its parts. What is asked of the
caches' sizes, this rank answers for itself: `Facts.cache_bytes_max` allows for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from worker.contract import (
    NO_TARGETS,
    Cut,
    Draw,
    Engine,
    Likelihood,
    Piece,
    Step,
    Targets,
)
from worker.drafts import NO_DRAFTS, Drafter, Weigher
from worker.guides import Foreseen
from worker.pictures import Blob, Picture
from worker.ranks import calls
from worker.ranks.line import RankGoneError


class Caller(Protocol):
    """`LeaderLine`, as far as it is used here."""

    def call(self, called: calls.Call) -> None: ...


class Handle:
    """A payload of the contract's: what was cut under a number, on every rank. `payload`: this rank's."""

    def __init__(self, number: int, payload: object, let_go: deque[int]) -> None:
        self.number, self.payload = number, payload
        self._let_go = let_go

    def __del__(self) -> None:
        # On whatever thread: the others are told with the next call.
        self._let_go.append(self.number)


class Leader:
    """`contract.Engine` over all ranks."""

    def __init__(self, engine: Engine, line: Caller) -> None:
        """`engine`: this rank's."""
        self._engine = engine
        self._line = line
        self._cuts = 0
        self._let_go: deque[int] = deque()
        self.shape = engine.shape
        # This rank guesses and weighs alone: what comes of it, all others are told.
        self.drafter: Drafter | None = engine.drafter
        self.weigher: Weigher | None = engine.weigher
        self.can_leave_out = engine.can_leave_out

    @contextmanager
    def _together(self, called: calls.Call) -> Iterator[None]:
        """Raises `RankGoneError` for all that fails here: who knows what the others have done."""
        self._tell(called)
        try:
            yield
        except Exception as error:
            raise RankGoneError(f"{type(called).__name__} has failed on this rank: {error!r}") from error

    def _tell(self, called: calls.Call) -> None:
        numbers = []
        while self._let_go:
            numbers.append(self._let_go.popleft())
        if numbers:
            self._line.call(calls.LetGo(numbers))
        self._line.call(called)

    # --- images: models that see are not split ---

    def look(self, picture: Picture) -> int:
        """See `contract.Engine`. Never called: models that see are refused."""
        raise AssertionError("a set does not see")

    def forget(self, digest: str) -> None:
        """See `contract.Engine`."""

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        """See `look`."""
        raise AssertionError("a set does not see")

    # --- rows ---

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, Targets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Likelihood]]:
        """See `contract.Engine`."""
        with self._together(calls.Prefill(calls.lists(chunks), dict(targets))):
            return self._engine.prefill(chunks, targets)

    def leave_out(self, row: str, first: int, last: int) -> None:
        """See `contract.Engine`."""
        with self._together(calls.LeaveOut(row, first, last)):
            self._engine.leave_out(row, first, last)

    def fork(self, row: str, copy: str) -> None:
        """See `contract.Engine`."""
        with self._together(calls.Fork(row, copy)):
            self._engine.fork(row, copy)

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        """See `contract.Engine`. May fail here alone, of a grammar: such a row is dropped, everywhere."""
        plain = replace(draw, grammar=None, logprobs=None)
        self._tell(calls.Start(row, list(tokens), prompt_tokens, plain, draw.grammar is not None))
        self._engine.start(row, tokens, prompt_tokens, draw)

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        """See `contract.Engine`."""
        with self._together(calls.Step(calls.lists(drafts))):
            return self._engine.step(drafts)

    def foresee(self, row: str, most: int) -> Foreseen:
        """See `contract.Engine`. This rank alone has the grammars; what it makes drafts of, all are told."""
        return self._engine.foresee(row, most)

    def drop(self, row: str) -> None:
        """See `contract.Engine`."""
        with self._together(calls.Drop(row)):
            self._engine.drop(row)

    def reset(self) -> None:
        """See `contract.Engine`."""
        with self._together(calls.Reset()):
            self._engine.reset()

    # --- what is stored of rows ---

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """See `contract.Engine`."""
        with self._together(calls.CutOut(row, list(runs), states, self._cuts)):
            cuts, state = self._engine.cut(row, runs, states=states)
        handled = [self._handled(cut) for cut in cuts]
        return handled, None if state is None else self._handled(state)

    def _handled(self, cut: Cut) -> Cut:
        number, self._cuts = self._cuts, self._cuts + 1
        return replace(cut, payload=Handle(number, cut.payload, self._let_go))

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """See `contract.Engine`."""
        own = [replace(piece, payload=_handle(piece.payload).payload) for piece in pieces]
        told = [(_handle(p.payload).number, p.first, p.last, p.count) for p in pieces]
        state = None if states is None else _handle(states)
        number, payload = (None, None) if state is None else (state.number, state.payload)
        with self._together(calls.Restore(row, told, number)):
            self._engine.restore(row, own, payload)

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        """See `contract.Engine`. Never called: sets keep nothing on disk."""
        raise AssertionError("a set keeps nothing on disk")

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        """See `pack`."""
        raise AssertionError("a set keeps nothing on disk")

    # --- bytes, as this rank counts them ---

    def cache_bytes(self) -> int:
        """See `contract.Engine`."""
        return self._engine.cache_bytes()

    def row_bytes(self, tokens: int) -> int:
        """See `contract.Engine`."""
        return self._engine.row_bytes(tokens)


def _handle(payload: object) -> Handle:
    assert isinstance(payload, Handle), "of a cut of this set"
    return payload
