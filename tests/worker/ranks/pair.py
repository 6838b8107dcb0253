"""A leader and a follower in one process. Calls are encoded, decoded and executed one call later, so that the
leader's samples exist when the follower samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import mlx.core as mx

from worker.interfaces import Engine
from worker.ranks import rpc
from worker.ranks.follower import Follower
from worker.ranks.leader import Leader
from worker.values import NO_DRAFTS, StepOutput


def steps_of(engine: Engine) -> list[dict[str, int]]:
    """Return a list that fills with the tokens of the engine's steps."""
    steps, run = list[dict[str, int]](), engine.step

    def step(drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        found = run(drafts)
        steps.append(dict(found.tokens))
        return found

    engine.step = step  # type: ignore[method-assign]
    return steps


class Pair:
    """`leader` runs rows; `follower` executes a call when the next one comes, or at `flush`."""

    def __init__(self) -> None:
        self._drawn: deque[mx.array] = deque()
        self._frames: deque[bytes] = deque()
        self.called: list[rpc.Call] = []

    def join(self, own: Engine, other: Engine) -> None:
        self.own, self.other = own, other
        self.own_steps, self.other_steps = steps_of(own), steps_of(other)
        self.leader = Leader(self.own, self)
        self.follower = Follower(self.other)

    def lead(self, tokens: mx.array) -> mx.array:
        """Record the tokens that the leader's sampler draws."""
        self._drawn.append(tokens)
        return tokens

    def follow(self, tokens: mx.array) -> mx.array:
        """Return the leader's tokens to the follower's sampler."""
        drawn = self._drawn.popleft()
        assert drawn.shape == tokens.shape
        return drawn

    def call(self, called: rpc.Call) -> None:
        self.flush()
        self._frames.append(rpc.encode(called))

    def flush(self) -> None:
        while self._frames:
            call = rpc.decode_call(self._frames.popleft())
            self.called.append(call)
            self.follower.obey(call)
