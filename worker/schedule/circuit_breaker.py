"""Circuit breakers of speculation: rests with exponential backoff, and measured balances. Pure.

Drafts are chosen by their expected gain. The balances hold the time that was actually gained or lost against
plain decoding, in plain steps, the un-pipelined steps around each verification step included. The state is
shared by all requests.
"""

from __future__ import annotations

STEP_COST_MAX = 4.0
"""Upper bound of one step's cost, in plain steps: the machine may have been busy."""
REST_STEPS_MAX = 8192
REST_STEPS = 128
"""First rest of all drafts, in plain steps."""
LOST_STEPS_MAX = 4.0
"""Loss, in plain steps, at which all drafts rest."""
_FADING = 0.99
"""Decay of the balance of all drafts per step."""

NETWORK_REST_STEPS = 512
"""First rest of a draft network, in steps."""
TRIED_GUESSES = 8
"""Number of draft tokens compared in a trial phase."""
TRIED_COST_MAX = 16.0
"""Cost in plain steps at which a trial phase ends early."""
VAIN_STEPS = 32
"""Consecutive steps without an expected gain after which the network rests."""
PROVEN_STEPS = 64
"""Steps with its drafts after which its next rest is only as long: the machine may have been busy."""
CREDIT_FIRST, CREDIT_MAX, CREDIT_STEP = 128.0, 512.0, 0.02
"""Plain steps that a network may cost before it has gained them: initial, maximum, added per step."""


class CircuitBreaker:
    """Exponential backoff: each rest is twice as long as the one before, the first has `rest_steps`."""

    def __init__(self, rest_steps: int) -> None:
        self._rest = 0
        self._next_rest = rest_steps

    @property
    def is_resting(self) -> bool:
        """Whether the breaker is open: there must be no drafts now."""
        return self._rest > 0

    def on_step(self) -> bool:
        """Count a step. Return whether a rest has just ended."""
        was_resting, self._rest = self.is_resting, max(0, self._rest - 1)
        return was_resting and not self.is_resting

    def _open(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, REST_STEPS_MAX)


class SpeculationBreaker(CircuitBreaker):
    """Circuit breaker of all drafts of a worker: they rest when they have lost time."""

    def __init__(self) -> None:
        super().__init__(REST_STEPS)
        self._gained = 0.0
        """Balance since the last rest; negative: lost."""

    def learn(self, tokens: float, cost: float) -> None:
        """Record a step that gained `tokens` tokens per row in the time of `cost` plain steps."""
        self._gained = self._gained * _FADING + tokens - min(cost, STEP_COST_MAX)
        if self._gained < -LOST_STEPS_MAX:
            self._gained = 0.0
            self._open()
        elif self._gained > LOST_STEPS_MAX:
            self._next_rest = REST_STEPS


class NetworkBreaker(CircuitBreaker):
    """Circuit breaker of a worker's draft network: a trial phase, use, and rests.

    In the trial phase the network runs beside plain steps, and its draft tokens are only compared with
    sampled tokens, so it costs its own passes and nothing else. If drafts are not expected to pay, the
    network rests, and is then tried again. It may neither draft nor prefill without `credit`.
    """

    def __init__(self) -> None:
        super().__init__(NETWORK_REST_STEPS)
        self.credit = CREDIT_FIRST
        """Balance, in plain steps."""
        self._begin_trial()
        self._steps_in_vain = 0
        self._used = 0

    def _begin_trial(self) -> None:
        self._left, self._cost = TRIED_GUESSES, 0.0

    @property
    def is_tried(self) -> bool:
        """Whether the trial phase runs: the network drafts beside plain steps, for one or a few rows."""
        return not self.is_resting and self._left > 0

    def tried(self, guesses: int, cost: float) -> None:
        """Record that `guesses` draft tokens were compared, at a cost of `cost` plain steps."""
        self._cost += min(max(0.0, cost), STEP_COST_MAX)
        self._left = 0 if self._cost >= TRIED_COST_MAX else max(0, self._left - guesses)

    def used(self) -> None:
        """Record a step that verifies its draft tokens."""
        self._steps_in_vain = 0
        self._used += 1
        if self._used >= PROVEN_STEPS:
            self._next_rest = PROVEN_STEPS

    def on_hopeless_step(self) -> None:
        """Record a step in which its drafts are not expected to pay for any row."""
        self._steps_in_vain += 1
        if self._steps_in_vain >= VAIN_STEPS:
            self._steps_in_vain = self._used = 0
            self._open()

    def on_step(self) -> bool:
        self.credit = min(self.credit + CREDIT_STEP, CREDIT_MAX)
        is_over = super().on_step()
        if is_over:
            self._begin_trial()
        return is_over
