"""A leader and a follower in one process: what is called is encoded, decoded, and obeyed a call later, so
that what the leader has drawn is there when the follower draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from worker.contract import Engine, Step
from worker.drafts import NO_DRAFTS
from worker.ranks import calls
from worker.ranks.follower import Follower
from worker.ranks.leader import Leader


class Recording:
    """An engine whose steps are kept."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[dict[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        step = self._engine.step(drafts)
        self.steps.append(dict(step.tokens))
        return step


class Pair:
    """`leader` for whoever runs rows; `follower` obeys when the next call comes, or at `flush`."""

    def __init__(self) -> None:
        self._drawn: deque[mx.array] = deque()
        self._frames: deque[bytes] = deque()
        self.called: list[calls.Call] = []

    def join(self, own: Engine, other: Engine) -> None:
        self.own, self.other = Recording(own), Recording(other)
        self.leader = Leader(self.own, self)  # type: ignore[arg-type]
        self.follower = Follower(self.other)  # type: ignore[arg-type]

    def lead(self, tokens: mx.array) -> mx.array:
        """For the leader's sampler: what it draws is kept."""
        self._drawn.append(tokens)
        return tokens

    def follow(self, tokens: mx.array) -> mx.array:
        """For the follower's: what the leader has drawn."""
        drawn = self._drawn.popleft()
        assert drawn.shape == tokens.shape
        return drawn

    def call(self, called: calls.Call) -> None:
        self.flush()
        self._frames.append(calls.encode(called))

    def flush(self) -> None:
        while self._frames:
            call = calls.decode_call(self._frames.popleft())
            self.called.append(call)
            self.follower.obey(call)
