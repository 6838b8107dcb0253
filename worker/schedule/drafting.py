"""Whether rows are fed drafts, and how long ones: as long as that is quicker than without. Pure.

A step that tries drafts takes longer than a plain one, for all rows that run. It is made where the tokens it
is expected to bring, by how often such drafts were right, are more for the time than a plain one's, by a
tenth. What is expected is measured all along, so drafts that do not pay end by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from protocol.parts import DraftStatus
from worker.contract import Step
from worker.guides import Foreseen
from worker.schedule.lookup import NO_DRAFT, Draft, Lookup
from worker.schedule.odds import HELD_TO, Costs, Odds, Rate
from worker.schedule.rows import Row
from worker.schedule.worth import Worth

DRAFTED_MAX = 15
"""Tokens of a row in one step."""
GAIN_MIN = 1.1
"""By how much more tokens in the same time it must be."""
_LENGTHS = (2, 4, 8, DRAFTED_MAX)
DOUBTED_STEPS = 400
"""After so many with drafts in a row it is measured again what a plain one takes."""
FUTILE_STEPS = 8
"""Where what rows are held to was asked for so often, and no draft made of it, it is asked for less often."""
_SELDOM_STEPS = 16
SETTLING_STEPS = 17
"""After drafts, so many steps are neither plain nor to be learned from."""


HELD = "held"
"""The source of drafts made of what an answer must say."""
Foresee = Callable[[str, int], Foreseen]
"""See `contract.Engine.foresee`."""


class Tried(NamedTuple):
    """Of the tokens that were drafted for a row."""

    right: int
    wrong: int


@dataclass(slots=True)
class _Source:
    """What is known of a row, whose answer had `seen` tokens when it was last looked at. `held`: how often
    what it is held to came as it was foreseen."""

    lookup: Lookup
    seen: int = 0
    odds: Odds = field(default_factory=Odds)
    held: Rate = field(default_factory=partial(Rate, HELD_TO))

    def expected(self, draft: Draft, count: int) -> float:
        """How many of so many of its tokens are right: each as its odds are, if all before it are."""
        odds = self.held.value if draft.source == HELD else self.odds.of(draft.matched)
        count = min(count, len(draft.tokens))
        return sum(odds ** max(0, place - draft.certain) for place in range(1, count + 1))

    def learn(self, draft: Draft, right: int, tried: int) -> None:
        """Of so many of its tokens so many were right. Of those that are certain nothing is learned."""
        if draft.source != HELD:
            self.odds.learn(draft.matched, right, tried)
        elif right >= draft.certain and tried > draft.certain:
            self.held.learn(right - draft.certain, tried - draft.certain)


def _unforeseen(row: str, most: int) -> Foreseen:
    return Foreseen()


class Drafting:
    """The drafts of a worker's rows. `is_on`: there are any."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._sources: dict[str, _Source] = {}
        self._costs = Costs()
        self._found: dict[str, Draft] = {}
        self._drafts: dict[str, Draft] = {}
        """Those of what was found that are tried."""
        self._worth = Worth()
        self._futile = 0
        """Steps on end for which rows were asked how they go on, and no draft was made."""
        self._since = SETTLING_STEPS
        self._running = 0
        self._lap_at: float | None = None
        self.accepted = self.rejected = 0
        """Drafted tokens, since the start."""

    def drop(self, id: str) -> None:
        """A row has gone. Unknown ones are no error."""
        self._sources.pop(id, None)

    def interrupt(self) -> None:
        """The step that comes is not to be learned from: something else ran before it."""
        self._lap_at = None

    def status(self) -> DraftStatus | None:
        """What came of all drafts so far; None: there are none."""
        return DraftStatus(accepted=self.accepted, rejected=self.rejected) if self._is_on else None

    def propose(self, rows: Sequence[Row], foresee: Foresee = _unforeseen) -> Mapping[str, Sequence[int]]:
        """What rows that decode, all of them, may say next: for some, or for none."""
        if self._worth.is_resting or (self._futile >= FUTILE_STEPS and self._futile % _SELDOM_STEPS):
            foresee = _unforeseen
        proposed = {row.id: self._proposed(row, foresee) for row in rows} if self._is_on else {}
        self._found = {id: draft for id, draft in proposed.items() if draft.tokens}
        length = 0 if self._worth.is_resting else self._best_length(self._found, len(rows))
        if self._futile >= FUTILE_STEPS or any(draft.source == HELD for draft in self._found.values()):
            self._futile = 0 if length else self._futile + 1
        self._drafts = {id: draft.first(length) for id, draft in self._found.items()} if length else {}
        return {id: draft.tokens for id, draft in self._drafts.items()}

    def _proposed(self, row: Row, foresee: Foresee) -> Draft:
        room = min(DRAFTED_MAX, row.request.max_tokens - len(row.answered) - 1, row.roof - row.length - 1)
        if room <= 0 or not row.request.speculation:
            return NO_DRAFT
        source = self._sources.get(row.id)
        if source is None:
            tokens = (*row.request.prediction, *row.request.tokens, *row.answered)
            source = self._sources[row.id] = _Source(Lookup(tokens), len(row.answered))
        source.lookup.extend(row.answered[source.seen :])
        source.seen = len(row.answered)
        found, foreseen = source.lookup.propose(room), foresee(row.id, room)
        if not foreseen.tokens:
            return found
        held = Draft(foreseen.tokens, source=HELD, certain=foreseen.certain)
        return max(found, held, key=lambda draft: source.expected(draft, room))

    def _best_length(self, found: Mapping[str, Draft], rows: int) -> int:
        """How long the drafts are to be; 0: there are to be none."""
        if not found:
            return 0
        best, most = 0, GAIN_MIN * rows
        for length in _LENGTHS:
            gained = sum(self._sources[id].expected(draft, length) for id, draft in found.items())
            columns = 1 + min(length, max(len(draft.tokens) for draft in found.values()))
            speed = (rows + gained) / self._costs.of(rows, columns)
            if speed > most:
                best, most = length, speed
        return best

    def learn(self, step: Step, rows: int, now: float) -> Mapping[str, Tried]:
        """What came of the last drafts, in a step of so many rows that ended now."""
        seconds = None if self._lap_at is None else now - self._lap_at
        self._lap_at = now
        self._since = 0 if self._drafts else self._since + 1
        if seconds is not None:
            self._lap(step, rows, seconds)
        self._running = self._running + 1 if self._drafts else 0
        if self._running >= DOUBTED_STEPS:
            self._costs.forget(rows)
            self._running = 0
        tried: dict[str, Tried] = {}
        for id, found in self._found.items():
            said = [
                *([step.tokens[id]] if id in step.tokens else ()),
                *(drawn.token for drawn in step.further.get(id, ())),
            ]
            draft = self._drafts.get(id)
            # What was not tried was right or wrong all the same, as far as is known by now.
            tokens = found.tokens[: len(said)] if draft is None else draft.tokens
            right = _agreeing(tokens, said)
            if id in self._sources:
                self._sources[id].learn(found, right, len(tokens))
            if draft is not None:
                tried[id] = Tried(right, len(tokens) - right)
        self.accepted += sum(each.right for each in tried.values())
        self.rejected += sum(each.wrong for each in tried.values())
        return tried

    def _lap(self, step: Step, rows: int, seconds: float) -> None:
        """Learn of a step that took so long."""
        columns = 1 + max((len(draft.tokens) for draft in self._drafts.values()), default=-1)
        if self._drafts or self._since > SETTLING_STEPS:
            self._costs.learn(rows, columns, seconds)
        plain = self._costs.plain(rows)
        if self._since > SETTLING_STEPS:
            self._worth.pass_()
        elif plain:
            tokens = len(step.tokens) + sum(map(len, step.further.values()))
            self._worth.learn(tokens / rows, seconds / plain)


def _agreeing(tokens: Sequence[int], said: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = zip(tokens, said, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
