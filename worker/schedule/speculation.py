"""Speculative-decoding policy: which rows verify drafts in a step, of which source and length. Pure.

A verification step takes longer than a plain one, for all rows. It is run only if the expected mean
inter-token time over all rows improves by at least 10%, given the measured acceptance rates. Rows without a
draft pay for the wider pass, so they count in the mean. Estimates are updated with every step, so drafts that
do not pay end by themselves.

N-gram drafts cost nothing. The draft network is run only if its drafts are expected to gain more, with the
time to make them included; the cost of its prefill must be gained too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from protocol.types import SpecDecodeStats, SpecDecodeStatus
from worker.common_prefix import common_prefix_length
from worker.contract.device_errors import raise_if_device_failed
from worker.contract.engine import SamplingParams, StepOutput
from worker.contract.guides import ForcedTokens
from worker.schedule.acceptance import VAIN_TRIES, DraftState
from worker.schedule.circuit_breaker import SpeculationBreaker
from worker.schedule.draft_length import DRAFTED_MAX, DraftChoice, DraftLengthPolicy
from worker.schedule.draft_proposals import DraftCatchUp, DraftProposals
from worker.schedule.ngram_proposer import FORCED, MODEL, Draft
from worker.schedule.rows import Row
from worker.schedule.step_cost import StepCostModel

log = logging.getLogger(__name__)

_SELDOM_STEPS = 16
"""Interval, in steps, at which forced tokens are computed that were not used `VAIN_TRIES` times in a row."""
SETTLING_STEPS = 1
"""Steps after one with drafts that count neither as plain nor as measurements: the engine only starts its
pipeline again."""

Foresee = Callable[[str, int], ForcedTokens]
"""Signature of `Engine.forced_tokens`."""


class DraftOutcome(NamedTuple):
    """Numbers of accepted (`right`) and rejected (`wrong`) draft tokens."""

    right: int
    wrong: int


def _not_forced(row: str, most: int) -> ForcedTokens:
    return ForcedTokens()


class Speculation:
    """Speculation of one worker. `is_on`: drafts are enabled. `following`: the draft network, if any.
    `position_cost`: as in `contract.Model`."""

    def __init__(
        self, *, is_on: bool = True, following: DraftCatchUp | None = None, position_cost: float | None = None
    ) -> None:
        self._is_on = is_on
        self._catch_up = following if is_on else None
        self._sources: dict[str, DraftState] = {}
        network = (following.relative_cost, following.block) if following else (0.0, 1)
        self._costs = StepCostModel(*network, position_cost)
        self._choices = DraftLengthPolicy(self._sources, self._costs)
        self._proposals: DraftProposals | None = None
        if self._catch_up is not None:
            self._proposals = DraftProposals(self._catch_up, self._choices, self._costs, self._sources)
        self._found: dict[str, Draft] = {}
        """N-gram drafts and forced tokens of the current step, by row."""
        self._drafts: dict[str, Draft] = {}
        """Drafts that the current step verifies, of any source."""
        self._breaker = SpeculationBreaker()
        self._futile_steps = 0
        """Consecutive steps in which forced tokens were computed, but no draft was chosen."""
        self._since = SETTLING_STEPS + 1
        """Steps since the last one with drafts."""
        self._step_ended_at: float | None = None
        self._tallies: dict[str, DraftOutcome] = {}
        """Outcomes by source, since the start."""

    @property
    def accepted(self) -> int:
        """Accepted draft tokens since the start."""
        return sum(tally.right for tally in self._tallies.values())

    @property
    def rejected(self) -> int:
        """Rejected draft tokens since the start."""
        return sum(tally.wrong for tally in self._tallies.values())

    def drop(self, id: str) -> None:
        """Forget a row. Unknown ids are ignored."""
        self._sources.pop(id, None)

    def interrupt(self) -> None:
        """Exclude the next step from the measurements: something else ran before it."""
        self._step_ended_at = None

    def status(self) -> SpecDecodeStatus | None:
        """Return the counts of all drafts so far; None if drafts are disabled."""
        if not self._is_on:
            return None
        sources = {
            name: SpecDecodeStats(accepted=tally.right, rejected=tally.wrong)
            for name, tally in self._tallies.items()
        }
        return SpecDecodeStatus(accepted=self.accepted, rejected=self.rejected, sources=sources)

    # --- what is tried ---

    def propose(
        self, rows: Sequence[Row], forced_tokens: Foresee = _not_forced
    ) -> Mapping[str, Sequence[int]]:
        """Return the drafts to verify in the next step, by row id. `rows`: all rows that decode."""
        if self._proposals is not None:
            self._proposals.begin()
        self._found, self._drafts = {}, {}
        if self._is_on and not self._breaker.is_resting:
            is_hopeless = not self._choices.may_pay(len(rows))
            if is_hopeless:
                self._costs.on_hopeless_step()
            if not is_hopeless or self._proposals is not None:
                self._draft(rows, forced_tokens)
        return {id: draft.tokens for id, draft in self._drafts.items()}

    def _draft(self, rows: Sequence[Row], forced_tokens: Foresee) -> None:
        if self._futile_steps >= VAIN_TRIES and self._futile_steps % _SELDOM_STEPS:
            forced_tokens = _not_forced
        rooms = {row: room for row in rows if self._is_due(row) and (room := _room(row)) > 0}
        proposed = {row.id: self._proposed(row, room, forced_tokens) for row, room in rooms.items()}
        self._found = {id: draft for id, draft in proposed.items() if draft.tokens}
        choice = self._choices.best(self._found, len(rows))
        if self._futile_steps >= VAIN_TRIES or any(draft.source == FORCED for draft in self._found.values()):
            self._futile_steps = 0 if choice.length else self._futile_steps + 1
        found = dict(self._found)
        choice = self._proposed_by_network(choice, found, rooms, len(rows))
        drafts = {id: draft.first(choice.length) for id, draft in found.items()} if choice.length else {}
        self._drafts = {id: draft for id, draft in drafts.items() if draft.tokens}

    def _is_due(self, row: Row) -> bool:
        """Return whether a draft of any source may be found for the row now."""
        source = self._sources.get(row.id)
        return (
            source is None
            or source.is_forced
            or source.is_due(len(row.answered))
            or self._proposals is not None
        )

    def _proposed(self, row: Row, room: int, forced_tokens: Foresee) -> Draft:
        """Return the better of the n-gram draft and the forced tokens."""
        source = self._source(row)
        found = source.look_up(room)
        foreseen = forced_tokens(row.id, room) if source.is_forced else ForcedTokens()
        if not foreseen.tokens:
            return found
        held = Draft(foreseen.tokens, source=FORCED, certain=foreseen.certain)
        return max(found, held, key=lambda draft: source.expected(draft, room))

    def _source(self, row: Row) -> DraftState:
        """Return the row's draft state, brought up to date."""
        source = self._sources.get(row.id)
        if source is None:
            source = self._sources[row.id] = DraftState(
                (*row.request.prediction, *row.request.tokens, *row.answered),
                len(row.answered),
                is_forced=_is_forced(row.request.sampling),
                network=self._catch_up.acceptance if self._catch_up else None,
            )
        source.lookup.extend(row.answered[source.seen :])
        source.seen = len(row.answered)
        return source

    def _proposed_by_network(
        self, choice: DraftChoice, found: dict[str, Draft], rooms: Mapping[Row, int], rows: int
    ) -> DraftChoice:
        """Return a better choice if the draft network's drafts make one; add those drafts to `found`."""
        if self._proposals is None or not self._proposals.is_allowed:
            return choice
        try:
            return self._proposals.better(
                choice, found, rooms, rows, may_read=self._step_ended_at is not None
            )
        except Exception as error:  # the drafter's boundary: an optimization must not fail a request
            raise_if_device_failed(error)
            log.exception("the draft model failed, and is disabled from now on")
            self._proposals = self._catch_up = None
            return choice

    # --- what came of it ---

    def learn(self, step: StepOutput, rows: int, now: float) -> Mapping[str, DraftOutcome]:
        """Update all estimates after a step; return the outcome of its drafts by row id.

        `rows`: number of rows in the step; `now`: the time of its end.
        """
        if not self._is_on:
            return {}
        tokens = len(step.tokens) + sum(map(len, step.further.values()))
        self._on_step_end(rows, tokens, None if self._step_ended_at is None else now - self._step_ended_at)
        self._step_ended_at = now
        self._choices.has_drafted(is_so=bool(self._drafts))
        if self._drafts:
            self._costs.on_drafts(rows)
        if self._proposals is not None:
            self._proposals.learn(step)
        tried: dict[str, DraftOutcome] = {}
        for id in self._found.keys() | self._drafts.keys():
            said = [
                *([step.tokens[id]] if id in step.tokens else ()),
                *(drawn.token for drawn in step.further.get(id, ())),
            ]
            if id in self._drafts:
                tried[id] = self._learn_tried(id, self._drafts[id], said)
            if id in self._found and id in self._sources:
                self._learn_ngram(id, said)
        return tried

    def _on_step_end(self, rows: int, tokens: int, seconds: float | None) -> None:
        guesses = self._proposals.passes if self._proposals else 0
        # A pipelined plain step is still running. It samples what the first draft token is compared with, and
        # ends before the others are verified.
        is_turning = bool(self._drafts) and self._since > 0
        self._since = 0 if self._drafts else self._since + 1
        plain, gained = self._costs.plain(rows), tokens / rows
        is_telling = self._proposals.on_step_end(seconds, gained, plain) if self._proposals else True
        if seconds is None or not is_telling:
            return
        is_quiet = self._since > SETTLING_STEPS
        if is_quiet and not guesses:
            self._breaker.on_step()
        elif plain and not is_quiet:
            self._breaker.learn(gained, seconds / plain)
        columns = 1 + max((len(draft.tokens) for draft in self._drafts.values()), default=-1) - is_turning
        if (self._drafts and columns > 1) or is_quiet:
            self._costs.learn(rows, columns, seconds - plain if is_turning else seconds, guesses)

    def _learn_tried(self, id: str, draft: Draft, said: Sequence[int]) -> DraftOutcome:
        right = common_prefix_length(draft.tokens, said)
        tried = DraftOutcome(right, len(draft.tokens) - right)
        tally = self._tallies.get(draft.source, DraftOutcome(0, 0))
        self._tallies[draft.source] = DraftOutcome(tally.right + tried.right, tally.wrong + tried.wrong)
        if draft.source == MODEL and id in self._sources:
            self._sources[id].learn(draft, right, len(draft.tokens))
        return tried

    def _learn_ngram(self, id: str, said: Sequence[int]) -> None:
        """Update the row's rates by its free draft; an unverified one is compared with this step's tokens."""
        found, draft = self._found[id], self._drafts.get(id)
        is_tried = draft is not None and draft.source == found.source
        tokens = draft.tokens if draft is not None and is_tried else found.tokens[: len(said)]
        self._sources[id].learn(found, common_prefix_length(tokens, said), len(tokens))


def _is_forced(sampling: SamplingParams) -> bool:
    """Return whether constraints may force tokens of the answer."""
    return bool(sampling.forced) or sampling.thinking_budget is not None or sampling.grammar is not None


def _room(row: Row) -> int:
    """Return the maximum number of draft tokens for a row."""
    if row.sparse or not row.request.speculation:
        return 0
    return min(
        DRAFTED_MAX,
        row.request.max_tokens - len(row.answered) - 1,
        row.reserved_length - row.length - 1,
    )
