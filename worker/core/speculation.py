"""Speculative-decoding policy: which rows verify drafts in a step, and of which source. Pure.

A verify step takes longer than a plain one, for all rows: by a fixed price for each token of the longest
draft, and by the passes of the draft network. It is run if the time between tokens is expected to become
shorter by it, as a mean over all rows. What is expected follows from a moving average of accepted tokens.
N-gram drafts and forced tokens cost nothing but their columns, so they are compared with what is sampled also
while they are not verified. A draft network reads what it has missed between steps, where its drafts pay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from protocol.types import SpecDecodeStats, SpecDecodeStatus
from worker.common_prefix import common_prefix_length
from worker.core.draft_catch_up import DraftCatchUp
from worker.core.ngram_proposer import FORCED, LOOKUP, MODEL, NO_DRAFT, Draft, NgramProposer
from worker.core.rows import Row
from worker.interfaces import DraftProposer
from worker.process.device_errors import raise_if_device_failed
from worker.values import ForcedTokens, StepOutput

log = logging.getLogger(__name__)

DRAFTED_MAX = 15
"""Maximum draft tokens of a row in one step: the widest pass that was measured has 16 columns."""


class DraftSource(NamedTuple):
    """Constants of a source of drafts: the `length` of a draft, the most `rows` of a step that it drafts for,
    the `acceptance` of a token that is assumed at first, and the `misses` behind which it pauses for a row:
    consecutive drafts without an accepted token, or lookups that find none."""

    length: int
    rows: int
    acceptance: float
    misses: int


SOURCES = {
    LOOKUP: DraftSource(8, 16, 0.75, 8),
    MODEL: DraftSource(4, 8, 0.8, 4),
    FORCED: DraftSource(DRAFTED_MAX, 2**31, 0.75, 4),
}
"""All measured on CPUs (`bench/notes/speculation.md`). Lookups in edited files gain 6.3 tokens a pass with 8
drafts, and 8.8 with 15, which cost twice as much; rewriting gains 1.2 to 1.3 times at 16 rows, the most that
were measured. MTP layers gain 1.5 times at 4 rows, and lose at 16. Forced tokens are limited by the price
alone. An edit of three tokens takes about six lookups until the file is found again."""
GAIN_MIN = 1.1
"""Least expected gain in speed: a verify step is not pipelined, and a small model waits for the host for up
to a tenth of a step."""
POSITION_COST = 0.25
"""Price of a draft token in plain steps where none was measured at load: that of the bench's dense model."""
ROWS_COST = 0.06
"""What each doubling of the rows adds to the price: `bench.drafts --columns` found 0.05, 0.16 and 0.29 at 1,
4 and 16 rows of a dense model, and 0.15, 0.23 and 0.38 of a hybrid one."""
PAUSE_TOKENS = 16
"""Length of a pause, in tokens of the answer: a lookup takes the host 1 to 3% of a small model's step."""
_START_WEIGHT = 4.0
"""Weight of the assumed acceptance, in tried tokens."""
_FADING = 0.99
"""Decay of a tried token's weight with each further one."""
_FORGETTING = 0.997
"""The same with each step in which a draft network is not used: a poor one is tried again after some 200."""

Foresee = Callable[[str, int], ForcedTokens]
"""Signature of `Engine.forced_tokens`."""


class DraftOutcome(NamedTuple):
    """Numbers of accepted (`right`) and rejected (`wrong`) draft tokens."""

    right: int
    wrong: int


class _Outlook(NamedTuple):
    """The tokens that a draft is expected to gain, and its `width` in columns."""

    gain: float
    width: int


class Average:
    """Moving average of accepted draft tokens over tried ones; at first `start`, below 1."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._accepted = self._tried = 0.0

    def expected(self, count: int) -> float:
        """Return the expected number of accepted tokens among `count`, none of which is behind a rejected
        one."""
        rate = (self._accepted + _START_WEIGHT * self._start) / (self._tried + _START_WEIGHT)
        return rate * (1 - rate**count) / (1 - rate)

    def learn(self, right: int, tried: int) -> None:
        """Record that the first `right` of `tried` tokens were accepted."""
        made = min(right + 1, tried)
        self.forget(_FADING**made)
        self._accepted += right
        self._tried += made

    def forget(self, kept: float) -> None:
        """Reduce the weight of what was learned to a share of it."""
        self._accepted, self._tried = self._accepted * kept, self._tried * kept


class RowDrafts:
    """What is known of a row: its n-gram index, up to `seen` tokens of the answer, and for each source its
    average, and its pause behind too many misses."""

    def __init__(self, row: Row, network: Average) -> None:
        """`network`: the draft network's average, over all rows."""
        sampling = row.request.sampling
        self._is_forced = bool(sampling.forced or sampling.grammar) or sampling.thinking_budget is not None
        self._seen = len(row.answered)
        self._lookup = NgramProposer((*row.request.prediction, *row.request.tokens, *row.answered))
        self._averages = {name: Average(SOURCES[name].acceptance) for name in (LOOKUP, FORCED)}
        self._averages[MODEL] = network
        self._misses = dict.fromkeys(SOURCES, 0)
        self._resumes_at = dict.fromkeys(SOURCES, 0)

    def update(self, row: Row) -> None:
        """Index the new tokens of the answer."""
        self._lookup.extend(row.answered[self._seen :])
        self._seen = len(row.answered)

    def is_paused(self, source: str) -> bool:
        return self._seen < self._resumes_at[source]

    def free_draft(self, row: Row, room: int, rows: int, forced_tokens: Foresee) -> Draft:
        """Return the forced tokens or the n-gram draft."""
        found = NO_DRAFT
        if rows <= SOURCES[LOOKUP].rows and not self.is_paused(LOOKUP):
            found = self._lookup.propose(min(room, SOURCES[LOOKUP].length))
            if not found.tokens:
                self._count(LOOKUP, 0)
        if not self._is_forced:
            return found
        tokens, certain = forced_tokens(row.id, room)
        held = Draft(tokens, source=FORCED, certain=certain)
        if self.is_paused(FORCED):
            held = held.first(certain)
        return held if certain else max(found, held, key=self.expected)

    def expected(self, draft: Draft) -> float:
        """Return the expected number of accepted tokens."""
        return draft.certain + self._averages[draft.source].expected(len(draft.tokens) - draft.certain)

    def learn(self, draft: Draft, sampled: Sequence[int], *, is_tried: bool) -> None:
        """Compare a draft with the tokens of the step; one that was not tried, as far as they go. Certain
        tokens say nothing."""
        tokens = draft.tokens if is_tried else draft.tokens[: len(sampled)]
        right = common_prefix_length(tokens, sampled) - draft.certain
        tried = len(tokens) - draft.certain
        if right >= 0 and tried > 0:
            self._averages[draft.source].learn(right, tried)
            self._count(draft.source, right)

    def _count(self, source: str, right: int) -> None:
        self._misses[source] = 0 if right else self._misses[source] + 1
        if self._misses[source] >= SOURCES[source].misses:
            self._misses[source], self._resumes_at[source] = 0, self._seen + PAUSE_TOKENS


class Speculation:
    """Speculation of one worker. `is_on`: drafts are enabled. `drafter`: the draft network, if any.
    `target_s`: between two tokens of a running stream. `position_cost`: as in `Model`."""

    def __init__(
        self,
        *,
        is_on: bool = True,
        drafter: DraftProposer | None = None,
        target_s: float = math.inf,
        position_cost: float | None = None,
    ) -> None:
        self._is_on = is_on
        self._network: DraftCatchUp | None = None
        if drafter is not None and is_on:
            self._network = DraftCatchUp(drafter, target_s, SOURCES[MODEL].length)
        self._network_average = Average(SOURCES[MODEL].acceptance)
        self._position_cost = POSITION_COST if position_cost is None else position_cost
        self._rows: dict[str, RowDrafts] = {}
        self._found: Mapping[str, Draft] = {}
        """N-gram drafts and forced tokens of the current step, by row."""
        self._drafts: Mapping[str, Draft] = {}
        """Drafts that the current step verifies, of any source."""
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
        self._rows.pop(id, None)

    def interrupt(self) -> None:
        """Record that something else runs before the next step: the draft network reads nothing beside it."""
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
        self, rows: Sequence[Row], forced_tokens: Foresee = lambda row, most: ForcedTokens()
    ) -> Mapping[str, Sequence[int]]:
        """Return the drafts to verify in the next step, by row id. `rows`: all rows that decode."""
        self._found, self._drafts = {}, {}
        ideal = [_Outlook(DRAFTED_MAX, DRAFTED_MAX)] * len(rows)
        if self._is_on and self._speed(len(rows), ideal) > GAIN_MIN:
            rooms = {row: room for row in rows if (room := _room(row)) > 0}
            free = {row.id: self._free_draft(row, rooms[row], len(rows), forced_tokens) for row in rooms}
            self._found = {id: draft for id, draft in free.items() if draft.tokens}
            self._drafts = self._best(rooms, len(rows))
        return {id: draft.tokens for id, draft in self._drafts.items()}

    def _free_draft(self, row: Row, room: int, rows: int, forced_tokens: Foresee) -> Draft:
        known = self._rows.get(row.id)
        if known is None:
            known = self._rows[row.id] = RowDrafts(row, self._network_average)
        known.update(row)
        return known.free_draft(row, room, rows, forced_tokens)

    def _speed(self, rows: int, drafts: Collection[_Outlook], passes_cost: float = 0.0) -> float:
        """Return the speed over that of plain steps, from the mean time between tokens over rows: a row that
        gains much does not make up for many that wait for it. `passes_cost`: of the draft network."""
        if not drafts:
            return 0.0
        price = self._position_cost + ROWS_COST * math.log2(rows)
        cost = 1 + price * max(draft.width for draft in drafts) + passes_cost
        waits = rows - len(drafts) + sum(1 / (1 + draft.gain) for draft in drafts)
        return rows / waits / cost

    def _best(self, rooms: Mapping[Row, int], rows: int) -> Mapping[str, Draft]:
        """Return the drafts found, with the network's where those gain more; none if they do not pay."""
        found = {
            id: _Outlook(self._rows[id].expected(draft), len(draft.tokens))
            for id, draft in self._found.items()
        }
        speed = max(GAIN_MIN, self._speed(rows, found.values()))
        free = self._found if speed > GAIN_MIN else {}
        if self._network is None or rows > SOURCES[MODEL].rows:
            return free
        try:
            drafts = self._with_network(self._network, rooms, rows, found, speed)
        except Exception as error:  # the drafter's boundary: an optimization must not fail a request
            raise_if_device_failed(error)
            log.exception("the draft model failed, and is disabled from now on")
            self._network = None
            return free
        if not drafts:
            self._network_average.forget(_FORGETTING)
        return drafts or free

    def _with_network(
        self,
        network: DraftCatchUp,
        rooms: Mapping[Row, int],
        rows: int,
        found: Mapping[str, _Outlook],
        speed: float,
    ) -> Mapping[str, Draft]:
        """Return drafts that are faster than `speed`, if the network's make them so; let it read a row that
        gains by that."""
        hopes: dict[Row, _Outlook] = {}
        for row, room in rooms.items():
            if network.knows(row) and not self._rows[row.id].is_paused(MODEL):
                gain = self._network_average.expected(min(network.length, room))
                if row.id not in found or gain > found[row.id].gain:
                    hopes[row] = _Outlook(gain, network.length)

        def is_faster(asked: Collection[Row]) -> bool:
            drafts = {**found, **{row.id: hopes[row] for row in asked}}
            return bool(asked) and self._speed(rows, drafts.values(), network.cost) > speed

        near = [row for row in hopes if network.is_caught_up(row)]
        late = hopes.keys() - near
        if late and self._step_ended_at is not None and is_faster(hopes):
            network.read(late)
        if not is_faster(near):
            return {}
        guesses = {
            row.id: Draft(tuple(tokens[: rooms[row]]), source=MODEL)
            for row, tokens in network.propose(near).items()
            if tokens
        }
        return {**self._found, **guesses} if guesses else {}

    # --- what came of it ---

    def learn(self, step: StepOutput, now: float) -> Mapping[str, DraftOutcome]:
        """Record what a step, which ended at `now`, made of its drafts; return the outcomes by row id."""
        if not self._is_on:
            return {}
        if self._network is not None:
            self._network.on_step_end(None if self._step_ended_at is None else now - self._step_ended_at)
        self._step_ended_at = now
        tried: dict[str, DraftOutcome] = {}
        for id in self._found.keys() | self._drafts.keys():
            first = [step.tokens[id]] if id in step.tokens else []
            sampled = first + [each.token for each in step.further.get(id, ())]
            found, draft, known = self._found.get(id), self._drafts.get(id), self._rows.get(id)
            if draft is not None:
                tried[id] = self._count(draft, sampled)
            if known is not None and draft is not None:
                known.learn(draft, sampled, is_tried=True)
            if known is not None and found is not None and found is not draft:
                known.learn(found, sampled, is_tried=False)
        return tried

    def _count(self, draft: Draft, sampled: Sequence[int]) -> DraftOutcome:
        right = common_prefix_length(draft.tokens, sampled)
        tried = DraftOutcome(right, len(draft.tokens) - right)
        tally = self._tallies.get(draft.source, DraftOutcome(0, 0))
        self._tallies[draft.source] = DraftOutcome(tally.right + tried.right, tally.wrong + tried.wrong)
        return tried


def _room(row: Row) -> int:
    """Return the maximum number of draft tokens for a row."""
    if row.is_private or not row.request.speculation:
        return 0
    return min(
        DRAFTED_MAX,
        row.request.max_tokens - len(row.answered) - 1,
        row.reserved_length - row.length - 1,
    )
