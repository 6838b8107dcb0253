"""Proposals of the draft network: for which rows, after which prefill, and at what cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.contract.drafts import BACKLOG_MAX, DraftProposer
from worker.contract.engine import StepOutput
from worker.schedule.acceptance import AcceptanceEstimate, DraftState
from worker.schedule.circuit_breaker import NetworkBreaker
from worker.schedule.draft_length import DRAFTED_MAX, DraftChoice, DraftLengthPolicy
from worker.schedule.ngram_proposer import MODEL, Draft
from worker.schedule.prefill_cost import PrefillCostModel, PrefillWork
from worker.schedule.rows import Row
from worker.schedule.step_cost import StepCostModel

READ_SHARE = 0.5
"""Share of the inter-token target within which a step and the drafter's prefill must fit."""
READ_TOKENS_MAX = 2048
"""Largest prefill chunk of the drafter."""
DOUBTED_READS = 2
"""Number of first prefills that are not representative: kernels are compiled in them."""
ANSWER_TOKENS = 256
"""Tokens that a row is expected to answer yet, when its prefill is weighed; as many as it has, if more."""
_TRIED_SHARE = 1 / 2
"""Share of the decode time that drafts are taken to save while their gain is unknown."""


class DraftCatchUp:
    """A drafter with its prefill cost and its acceptance estimate.

    It drafts for rows of whose tokens it has prefilled all but a few. It catches up with others between
    steps, one chunk of a row at a time, small enough that running streams keep their inter-token target.
    """

    def __init__(self, drafter: DraftProposer, target_s: float) -> None:
        """`target_s`: between two tokens of a running stream."""
        self.relative_cost, self.block = drafter.relative_cost, drafter.block
        self.acceptance = AcceptanceEstimate()
        """For all rows."""
        self._drafter = drafter
        self._pace = PrefillCostModel(target_s=READ_SHARE * target_s, tokens_max=READ_TOKENS_MAX)
        self._read = PrefillWork()
        self._reads = 0

    def retry_drafting(self) -> None:
        """Forget the acceptance of all drafts: they have not paid for long, but may now."""
        self.acceptance.reset()

    def knows(self, row: Row) -> bool:
        """Return whether the drafter could draft for the row once it has caught up."""
        # A hidden-state drafter may start at a position whose token has not been reported yet.
        return not row.images and self._drafter.knows(row.id) and self.backlog(row) > 0

    def is_caught_up(self, row: Row) -> bool:
        """Return whether the drafter could draft for the row at once."""
        return self.backlog(row) <= BACKLOG_MAX

    def backlog(self, row: Row) -> int:
        """Return the number of the row's tokens that the drafter has not prefilled."""
        return row.length - self._drafter.length(row.id)

    def seconds(self, row: Row) -> float:
        """Return the estimated seconds to catch up with the row; 0: not known yet."""
        if self._reads < DOUBTED_READS:
            return 0.0
        return self._pace.seconds(PrefillWork.call(1, self.backlog(row), self._drafter.length(row.id)))

    def propose(self, rows: Sequence[Row], count: int) -> dict[str, Draft]:
        """Draft up to `count` tokens for each row; all of them must be near (`is_caught_up`)."""
        new_tokens = {row.id: _tokens_from(row, self._drafter.length(row.id)) for row in rows}
        return {
            id: Draft(tuple(tokens), source=MODEL)
            for id, tokens in self._drafter.draft(new_tokens, count).items()
        }

    def read(self, rows: Sequence[Row]) -> None:
        """Prefill the drafter for these rows, in order, within the budget; of the first at least a chunk."""
        budget = self._pace.budget(decoding=True)
        for row in rows:
            done = self._drafter.length(row.id)
            count = budget.chunk_length(row.length - done - 1, done)
            if not count:
                return
            self._drafter.read(row.id, _tokens_from(row, done)[:count])
            budget.spend(PrefillWork.call(1, count, done))
            self._read = budget.spent

    @property
    def has_read(self) -> bool:
        """Whether the drafter has prefilled since the last lap."""
        return self._read.calls > 0

    def on_step_end(self, seconds: float | None) -> None:
        """Record the duration of a step, the drafter's prefill included; None: not to be learned from."""
        if seconds is not None:
            self._pace.learn(seconds, decoded=True, work=self._read)
            self._reads += self.has_read
        self._read = PrefillWork()


class DraftProposals:
    """The draft network's proposals and their results.

    `passes`: length of the drafts that it proposed for the current step; 0: none.
    """

    def __init__(
        self,
        catch_up: DraftCatchUp,
        choices: DraftLengthPolicy,
        costs: StepCostModel,
        sources: Mapping[str, DraftState],
    ) -> None:
        """`sources`: the draft state of each row."""
        self.passes = 0
        self._catch_up = catch_up
        self._choices = choices
        self._costs = costs
        self._sources = sources
        self._breaker = NetworkBreaker()
        self._trials: dict[str, tuple[int, ...]] = {}
        """Trial drafts by row that have not been compared yet."""
        self._is_beside = False
        """Trial drafts were made beside the current step."""
        self._is_warm = False
        """The last step had drafts of the network: this one compiles nothing, and no row changes places."""

    @property
    def is_allowed(self) -> bool:
        """Whether the network may draft or prefill now."""
        return self._breaker.credit > 0 and not self._breaker.is_resting

    def begin(self) -> None:
        """Begin a step."""
        self.passes, self._is_beside = 0, False

    # --- what is tried ---

    def better(
        self,
        choice: DraftChoice,
        found: dict[str, Draft],
        rooms: Mapping[Row, int],
        rows: int,
        *,
        may_read: bool,
    ) -> DraftChoice:
        """Return a better choice than `choice` if the network's drafts make one; add those drafts to `found`.

        `may_read`: the network may prefill, as nothing else runs in this step.
        """
        open_ = {row: room for row, room in rooms.items() if self._catch_up.knows(row)}
        if not open_ or not self._costs.is_measured(rows):
            return choice
        if self._breaker.is_tried:
            if may_read and not choice.length:
                self._try(list(open_), rows)
            return choice
        if not self._choices.best({}, rows, open_).asked:
            self._breaker.on_hopeless_step()
            return choice
        return self._used(choice, found, open_, rows, may_read=may_read)

    def _used(
        self,
        choice: DraftChoice,
        found: dict[str, Draft],
        rooms: Mapping[Row, int],
        rows: int,
        *,
        may_read: bool,
    ) -> DraftChoice:
        near = {row: room for row, room in rooms.items() if self._catch_up.is_caught_up(row)}
        better = self._choices.best(found, rows, near) if near else choice
        if may_read and len(near) < len(rooms):
            self._read(max(choice.speed, better.speed), found, rooms, rows)
        if better.speed <= choice.speed:
            return choice
        guesses = self._catch_up.propose(better.asked, better.length)
        found |= {row.id: guesses[row.id].first(rooms[row]) for row in better.asked if row.id in guesses}
        self.passes = better.length
        self._breaker.used()
        return better

    def _read(self, speed: float, found: Mapping[str, Draft], rooms: Mapping[Row, int], rows: int) -> None:
        """Prefill a chunk of rows that cannot be drafted for yet, if that is expected to pay."""
        hoped = self._choices.best(found, rows, rooms)
        late = [row for row in hoped.asked if not self._catch_up.is_caught_up(row)]
        if hoped.speed > speed and late:
            self._read_if_it_pays(late, rows, 1 - rows / hoped.speed)

    def _read_if_it_pays(self, late: list[Row], rows: int, spared: float) -> None:
        late.sort(key=self._catch_up.backlog)
        left = min(max(ANSWER_TOKENS, len(row.answered)) for row in late)
        left = min(left, *(row.request.max_tokens - len(row.answered) for row in late))
        gain = min(self._breaker.credit, left * spared)
        if sum(map(self._catch_up.seconds, late)) < gain * self._costs.plain(rows):
            self._catch_up.read(late)

    def _try(self, rows: Sequence[Row], decoding: int) -> None:
        """Make trial drafts for rows that are near, or prefill the row with the least backlog."""
        if self._trials:
            return  # the tokens of a drafted block are compared one by one
        near = [row for row in rows if self._catch_up.is_caught_up(row)]
        if near:
            count = min(self._catch_up.block, DRAFTED_MAX)
            guesses = self._catch_up.propose(near, count)
            self._trials = {id: draft.tokens for id, draft in guesses.items() if draft.tokens}
            self.passes, self._is_beside = count, True
        else:
            self._read_if_it_pays([min(rows, key=self._catch_up.backlog)], decoding, _TRIED_SHARE)

    # --- what came of it ---

    def learn(self, step: StepOutput) -> None:
        """Compare trial drafts with the sampled tokens of a step."""
        for id, tokens in list(self._trials.items()):
            del self._trials[id]
            if id not in self._sources or id not in step.tokens:
                continue
            is_right = tokens[0] == step.tokens[id]
            self._sources[id].learn(Draft(tokens[:1], source=MODEL), int(is_right), 1)
            self._breaker.tried(1, 0.0)
            if is_right and len(tokens) > 1 and not step.further.get(id):
                self._trials[id] = tokens[1:]

    def on_step_end(self, seconds: float | None, gained: float, plain: float) -> bool:
        """Record a step that took `seconds` (None: not representative) and gained `gained` tokens per row.

        `plain`: seconds of a plain step, 0: unknown. Return whether the step's duration may be learned from.
        """
        has_read, was_warm = self._catch_up.has_read, self._is_warm
        self._catch_up.on_step_end(seconds)
        self._is_warm = self.passes > 0
        if seconds is not None and plain:
            cost = seconds / plain - gained
            if self.passes or has_read:
                self._breaker.credit -= cost
            if self._is_beside:
                self._breaker.tried(0, cost)
        if self._breaker.on_step():
            # Drafts may have been poor, or slow because the machine was busy.
            self._costs.forget_draft_passes()
            self._catch_up.retry_drafting()
        return not has_read and (was_warm or not self.passes)


def _tokens_from(row: Row, count: int) -> tuple[int, ...]:
    """Return the row's tokens from index `count` on, with all answered ones, which `row.tokens` may lack."""
    prompt = row.request.tokens
    if count < len(prompt):
        return (*prompt[count:], *row.answered)
    return tuple(row.answered[count - len(prompt) :])
