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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from protocol.types import SpecDecodeStats, SpecDecodeStatus
from worker.common_prefix import common_prefix_length
from worker.core.drafts import DRAFTED_MAX, MODEL, SOURCES, Average, Draft, RowDrafts
from worker.core.rows import Row
from worker.interfaces import DraftProposer
from worker.process.device_errors import raise_if_device_failed
from worker.values import BACKLOG_MAX, ForcedTokens, StepOutput

log = logging.getLogger(__name__)

READ_SHARE = 0.5
"""Share of the inter-token target within which a step and the network's prefill must fit."""
READ_TOKENS_MIN, READ_TOKENS_MAX = 16, 2048
"""Tokens of a prefill chunk of the network, which begins with the least."""
ANSWER_TOKENS = 256
"""Tokens that a row is expected to answer yet; as many as it has, if more."""
READ_PER_TOKEN = 32
"""Tokens that the network may have to read for each of these: where it is a tenth of the model, and reads ten
times as fast as it drafts, that takes a third of the time."""
MISSED_TOKENS_MAX = 256
"""Tokens of its answer that a row may have got without the network: with more, it goes on without. Otherwise
a network that is tried again would first read all rows' answers."""


class DraftCatchUp:
    """A draft network, which drafts for rows of whose tokens it has read all but a few.

    It reads the others between steps, in chunks small enough that running streams keep their inter-token
    target.
    """

    def __init__(self, drafter: DraftProposer, target_s: float, length: int) -> None:
        """`target_s`: between two tokens of a running stream. `length`: of a draft."""
        self.length = length
        self.cost = drafter.relative_cost * length
        """Cost of the passes of a draft, in plain steps."""
        self._drafter = drafter
        self._read_s = READ_SHARE * target_s
        self._chunk = READ_TOKENS_MIN
        self._has_read = False

    def knows(self, row: Row) -> bool:
        """Return whether the network could draft for the row once it has read it."""
        # A hidden-state drafter may start at a position whose token has not been reported yet.
        return not row.images and self._drafter.knows(row.id) and self._backlog(row) > 0

    def is_caught_up(self, row: Row) -> bool:
        """Return whether the network could draft for the row at once."""
        return self._backlog(row) <= BACKLOG_MAX

    def _backlog(self, row: Row) -> int:
        return row.length - self._drafter.length(row.id)

    def propose(self, rows: Sequence[Row]) -> Mapping[Row, Sequence[int]]:
        """Draft for rows that are caught up."""
        drafts = self._drafter.draft({row.id: self._unread(row) for row in rows}, self.length)
        return {row: drafts[row.id] for row in rows if row.id in drafts}

    def read(self, rows: Iterable[Row]) -> None:
        """Read a chunk of tokens, of the rows that lack least first, where that is worth the answer."""
        left = self._chunk
        for row in sorted(rows, key=self._backlog):
            if left > 0 and self._is_worth_reading(row):
                tokens = self._unread(row)[:-1][:left]
                self._drafter.read(row.id, tokens)
                left -= len(tokens)
        self._has_read = left < self._chunk

    def _is_worth_reading(self, row: Row) -> bool:
        answered, backlog = len(row.answered), self._backlog(row)
        expected = min(max(ANSWER_TOKENS, answered), row.request.max_tokens - answered)
        return min(backlog, answered) <= MISSED_TOKENS_MAX and backlog <= READ_PER_TOKEN * expected

    def on_step_end(self, seconds: float | None) -> None:
        """Adapt the chunk to the duration of a step in which the network has read; None: unknown."""
        if self._has_read and seconds is not None:
            if seconds > self._read_s:
                self._chunk = max(self._chunk // 2, READ_TOKENS_MIN)
            elif seconds < self._read_s / 2:
                self._chunk = min(self._chunk * 2, READ_TOKENS_MAX)
        self._has_read = False

    def _unread(self, row: Row) -> tuple[int, ...]:
        """Return the row's unread tokens, with all answered ones, which `row.tokens` may lack."""
        read, prompt = self._drafter.length(row.id), row.request.tokens
        return (*prompt[read:], *row.answered[max(0, read - len(prompt)) :])


GAIN_MIN = 1.1
"""Least expected gain in speed: a verify step is not pipelined, and a small model waits for the host for up
to a tenth of a step."""
POSITION_COST = 0.25
"""Price of a draft token in plain steps where none was measured at load: that of the bench's dense model."""
ROWS_COST = 0.06
"""What each doubling of the rows adds to the price: `bench.drafts --columns` found 0.05, 0.16 and 0.29 at 1,
4 and 16 rows of a dense model, and 0.15, 0.23 and 0.38 of a hybrid one."""
_FORGETTING = 0.997
"""Decay of what was learned of a draft network with each step in which it is not used: a poor one is tried
again after some 200."""

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
        self.is_on = is_on
        self._network: DraftCatchUp | None = None
        if drafter is not None and is_on:
            self._network = DraftCatchUp(drafter, target_s, SOURCES[MODEL].length)
        self._network_average = Average(SOURCES[MODEL].acceptance)
        self._position_cost = POSITION_COST if position_cost is None else position_cost
        self._found: Mapping[Row, Draft] = {}
        """N-gram drafts and forced tokens of the current step."""
        self._drafts: Mapping[Row, Draft] = {}
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

    def interrupt(self) -> None:
        """Record that something else runs before the next step: the draft network reads nothing beside it."""
        self._step_ended_at = None

    def status(self) -> SpecDecodeStatus | None:
        """Return the counts of all drafts so far; None if drafts are disabled."""
        if not self.is_on:
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
        if self.is_on and self._speed(len(rows), ideal) > GAIN_MIN:
            rooms = {row: room for row in rows if (room := _room(row)) > 0}
            free = {row: self._free_draft(row, room, len(rows), forced_tokens) for row, room in rooms.items()}
            self._found = {row: draft for row, draft in free.items() if draft.tokens}
            self._drafts = self._best(rooms, len(rows))
        return {row.id: draft.tokens for row, draft in self._drafts.items()}

    def _free_draft(self, row: Row, room: int, rows: int, forced_tokens: Foresee) -> Draft:
        if row.drafts is None:
            row.drafts = RowDrafts(row.request, row.answered, self._network_average)
        row.drafts.update(row.answered)
        return row.drafts.free_draft(room, rows, partial(forced_tokens, row.id))

    def _speed(self, rows: int, drafts: Collection[_Outlook], passes_cost: float = 0.0) -> float:
        """Return the speed over that of plain steps, from the mean time between tokens over rows: a row that
        gains much does not make up for many that wait for it. `passes_cost`: of the draft network."""
        if not drafts:
            return 0.0
        price = self._position_cost + ROWS_COST * math.log2(rows)
        cost = 1 + price * max(draft.width for draft in drafts) + passes_cost
        waits = rows - len(drafts) + sum(1 / (1 + draft.gain) for draft in drafts)
        return rows / waits / cost

    def _best(self, rooms: Mapping[Row, int], rows: int) -> Mapping[Row, Draft]:
        """Return the drafts found, with the network's where those gain more; none if they do not pay."""
        found = {
            row: _Outlook(row.drafts.expected(draft), len(draft.tokens))
            for row, draft in self._found.items()
            if row.drafts is not None
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
        found: Mapping[Row, _Outlook],
        speed: float,
    ) -> Mapping[Row, Draft]:
        """Return drafts that are faster than `speed`, if the network's make them so; let it read a row that
        gains by that."""
        hopes: dict[Row, _Outlook] = {}
        for row, room in rooms.items():
            if network.knows(row) and row.drafts is not None and not row.drafts.is_paused(MODEL):
                gain = self._network_average.expected(min(network.length, room))
                if row not in found or gain > found[row].gain:
                    hopes[row] = _Outlook(gain, network.length)

        def is_faster(asked: Collection[Row]) -> bool:
            drafts = {**found, **{row: hopes[row] for row in asked}}
            return bool(asked) and self._speed(rows, drafts.values(), network.cost) > speed

        near = [row for row in hopes if network.is_caught_up(row)]
        late = hopes.keys() - near
        if late and self._step_ended_at is not None and is_faster(hopes):
            network.read(late)
        if not is_faster(near):
            return {}
        guesses = {
            row: Draft(tuple(tokens[: rooms[row]]), source=MODEL)
            for row, tokens in network.propose(near).items()
            if tokens
        }
        return {**self._found, **guesses} if guesses else {}

    # --- what came of it ---

    def learn(self, step: StepOutput, now: float) -> None:
        """Record what a step, which ended at `now`, made of its drafts."""
        if self._network is not None:
            self._network.on_step_end(None if self._step_ended_at is None else now - self._step_ended_at)
        self._step_ended_at = now
        for row in {**self._found, **self._drafts}:
            first = [step.tokens[row.id]] if row.id in step.tokens else []
            sampled = first + [each.token for each in step.further.get(row.id, ())]
            found, draft = self._found.get(row), self._drafts.get(row)
            if draft is not None:
                self._count(row, draft, sampled)
            if row.drafts is not None and draft is not None:
                row.drafts.learn(draft, sampled, is_tried=True)
            if row.drafts is not None and found is not None and found is not draft:
                row.drafts.learn(found, sampled, is_tried=False)

    def _count(self, row: Row, draft: Draft, sampled: Sequence[int]) -> None:
        right = common_prefix_length(draft.tokens, sampled)
        wrong = len(draft.tokens) - right
        row.accepted, row.rejected = row.accepted + right, row.rejected + wrong
        tally = self._tallies.get(draft.source, DraftOutcome(0, 0))
        self._tallies[draft.source] = DraftOutcome(tally.right + right, tally.wrong + wrong)


def _room(row: Row) -> int:
    """Return the maximum number of draft tokens for a row."""
    if row.is_private or not row.request.speculation:
        return 0
    return min(
        DRAFTED_MAX,
        row.request.max_tokens - len(row.answered) - 1,
        row.reserved_length - row.length - 1,
    )
