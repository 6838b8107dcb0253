"""Whether rows are fed drafts, whose, and how long ones: as long as that is quicker than without. Pure.

A step that tries drafts takes longer than a plain one, for all rows that run. It is made where, by how often
such drafts were right, the time between two tokens is expected to be shorter by a tenth, on the average of
all rows: who has no drafts waits for the others, and is not to wait for long. What is expected is measured
all along, so drafts that do not pay end by themselves.

What is looked up costs nothing. A network's guesses are asked for where they are expected to bring more than
that, the time it takes to make them included; what it takes to read a prompt first must be gained, too.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from protocol.parts import DraftStatus, DraftTally
from worker.contract import Draw, Step
from worker.guides import Foreseen
from worker.schedule.choices import DRAFTED_MAX, Choice, Choices
from worker.schedule.following import MODEL, USUAL, Following
from worker.schedule.guessing import Guessing
from worker.schedule.known import HELD, Known
from worker.schedule.lookup import Draft, Lookup
from worker.schedule.odds import Costs, Rate
from worker.schedule.rows import Row
from worker.schedule.worth import Worth

log = logging.getLogger(__name__)

DOUBTED_STEPS = 400
"""After so many with drafts it is measured again what a plain one takes."""
HOPELESS_STEPS = 4096
"""After so many for which no drafts would have paid it is measured again what columns cost."""
FUTILE_STEPS = 8
"""Where what rows are held to was asked for so often, and no draft made of it, it is asked for less often."""
_SELDOM_STEPS = 16
SETTLING_STEPS = 17
"""After drafts, so many steps are neither plain nor to be learned from."""

Foresee = Callable[[str, int], Foreseen]
"""See `contract.Engine.foresee`."""


class Tried(NamedTuple):
    """Of the tokens that were drafted for a row."""

    right: int
    wrong: int


def _unforeseen(row: str, most: int) -> Foreseen:
    return Foreseen()


class Drafting:
    """The drafts of a worker's rows. `is_on`: there are any. `following`: who guesses, if anybody does.
    `column_price`: see `contract.Model`."""

    def __init__(
        self, *, is_on: bool = True, following: Following | None = None, column_price: float | None = None
    ) -> None:
        self._is_on = is_on
        self._following = following if is_on else None
        self._sources: dict[str, Known] = {}
        told = (following.share, following.block) if following else (0.0, 1)
        self._costs = Costs(*told, column_price)
        self._choices = Choices(self._sources, self._costs)
        self._guessing: Guessing | None = None
        if self._following is not None:
            self._guessing = Guessing(self._following, self._choices, self._costs, self._sources)
        self._found: dict[str, Draft] = {}
        """What costs nothing to find."""
        self._drafts: dict[str, Draft] = {}
        """What is tried, of that or of guesses."""
        self._worth = Worth()
        self._futile = 0
        """Steps on end for which rows were asked how they go on, and no draft was made."""
        self._hopeless = 0
        """Steps for which no drafts would have paid, whatever they were."""
        self._since = SETTLING_STEPS
        self._unchecked = 0
        """Steps with drafts since a plain one was measured."""
        self._lap_at: float | None = None
        self._tallies: dict[str, Tried] = {}
        """By source, since the start."""

    @property
    def accepted(self) -> int:
        """Drafted tokens that were right, since the start."""
        return sum(tally.right for tally in self._tallies.values())

    @property
    def rejected(self) -> int:
        """And those that were not."""
        return sum(tally.wrong for tally in self._tallies.values())

    def drop(self, id: str) -> None:
        """A row has gone. Unknown ones are no error."""
        self._sources.pop(id, None)

    def interrupt(self) -> None:
        """The step that comes is not to be learned from: something else ran before it."""
        self._lap_at = None

    def status(self) -> DraftStatus | None:
        """What came of all drafts so far; None: there are none."""
        if not self._is_on:
            return None
        sources = {
            name: DraftTally(accepted=tally.right, rejected=tally.wrong)
            for name, tally in self._tallies.items()
        }
        return DraftStatus(accepted=self.accepted, rejected=self.rejected, sources=sources)

    # --- what is tried ---

    def propose(self, rows: Sequence[Row], foresee: Foresee = _unforeseen) -> Mapping[str, Sequence[int]]:
        """What rows that decode, all of them, may say next: for some, or for none."""
        if self._guessing is not None:
            self._guessing.begin()
        self._found, self._drafts = {}, {}
        if self._is_on and not self._worth.is_resting:
            is_hopeless = not self._choices.may_pay(len(rows))
            if is_hopeless:
                self._doubt()
            if not is_hopeless or self._guessing is not None:
                self._draft(rows, foresee)
        return {id: draft.tokens for id, draft in self._drafts.items()}

    def _doubt(self) -> None:
        """Nothing would pay, as far as is known: once in a while that is found out anew."""
        self._hopeless += 1
        if self._hopeless >= HOPELESS_STEPS:
            self._costs.doubt_prices()
            self._hopeless = 0

    def _draft(self, rows: Sequence[Row], foresee: Foresee) -> None:
        if self._futile >= FUTILE_STEPS and self._futile % _SELDOM_STEPS:
            foresee = _unforeseen
        rooms = {row: room for row in rows if self._is_due(row) and (room := _room(row)) > 0}
        proposed = {row.id: self._proposed(row, room, foresee) for row, room in rooms.items()}
        self._found = {id: draft for id, draft in proposed.items() if draft.tokens}
        choice = self._choices.best(self._found, len(rows))
        if self._futile >= FUTILE_STEPS or any(draft.source == HELD for draft in self._found.values()):
            self._futile = 0 if choice.length else self._futile + 1
        found = dict(self._found)
        choice = self._guessed(choice, found, rooms, len(rows))
        drafts = {id: draft.first(choice.length) for id, draft in found.items()} if choice.length else {}
        self._drafts = {id: draft for id, draft in drafts.items() if draft.tokens}

    def _is_due(self, row: Row) -> bool:
        """Whether anything may be found for it now, or guessed."""
        source = self._sources.get(row.id)
        return (
            source is None or source.is_held or source.is_due(len(row.answered)) or self._guessing is not None
        )

    def _proposed(self, row: Row, room: int, foresee: Foresee) -> Draft:
        """The better of what was looked up and of what the row is held to."""
        source = self._source(row)
        found = source.look_up(room)
        foreseen = foresee(row.id, room) if source.is_held else Foreseen()
        if not foreseen.tokens:
            return found
        held = Draft(foreseen.tokens, source=HELD, certain=foreseen.certain)
        return max(found, held, key=lambda draft: source.expected(draft, room))

    def _source(self, row: Row) -> Known:
        """What is known of the row, brought up to date."""
        source = self._sources.get(row.id)
        if source is None:
            tokens = (*row.request.prediction, *row.request.tokens, *row.answered)
            rate = self._following.open() if self._following else Rate(USUAL)
            source = Known(Lookup(tokens), rate, len(row.answered), _is_held(row.request.draw))
            self._sources[row.id] = source
        source.lookup.extend(row.answered[source.seen :])
        source.seen = len(row.answered)
        return source

    def _guessed(
        self, choice: Choice, found: dict[str, Draft], rooms: Mapping[Row, int], rows: int
    ) -> Choice:
        """A better choice, if a network's guesses make one; these are added to what was `found`."""
        if self._guessing is None or not self._guessing.is_open:
            return choice
        try:
            return self._guessing.better(choice, found, rooms, rows, may_read=self._lap_at is not None)
        except Exception:  # the drafter's boundary: nobody is to fail for what only makes him quicker
            log.exception("the draft model fails: there are no drafts of it any more")
            self._guessing = self._following = None
            return choice

    # --- what came of it ---

    def learn(self, step: Step, rows: int, now: float) -> Mapping[str, Tried]:
        """What came of the last drafts, in a step of so many rows that ended now."""
        if not self._is_on:
            return {}
        tokens = len(step.tokens) + sum(map(len, step.further.values()))
        self._lap(rows, tokens, None if self._lap_at is None else now - self._lap_at)
        self._lap_at = now
        self._choices.has_drafted(is_so=bool(self._drafts))
        self._unchecked += bool(self._drafts)
        if self._unchecked >= DOUBTED_STEPS:
            self._costs.forget(rows)
            self._unchecked = 0
        if self._guessing is not None:
            self._guessing.learn(step)
        tried: dict[str, Tried] = {}
        for id in self._found.keys() | self._drafts.keys():
            said = [
                *([step.tokens[id]] if id in step.tokens else ()),
                *(drawn.token for drawn in step.further.get(id, ())),
            ]
            if id in self._drafts:
                tried[id] = self._learn_tried(id, self._drafts[id], said)
            if id in self._found and id in self._sources:
                self._learn_found(id, said)
        return tried

    def _lap(self, rows: int, tokens: int, seconds: float | None) -> None:
        guesses = self._guessing.passes if self._guessing else 0
        # Rows that are fed their first drafts change places, and a plain step is still under way.
        is_turning = bool(self._drafts) and self._since >= SETTLING_STEPS - 1
        self._since = 0 if self._drafts else self._since + 1
        plain, gained = self._costs.plain(rows), tokens / rows
        is_telling = self._guessing.lap(seconds, gained, plain) if self._guessing else True
        if seconds is None or not is_telling:
            return
        is_quiet = self._since > SETTLING_STEPS
        if is_quiet and not guesses:
            self._worth.pass_()
        elif plain and not is_quiet:
            self._worth.learn(gained, seconds / plain)
        if not is_turning and (self._drafts or is_quiet):
            columns = 1 + max((len(draft.tokens) for draft in self._drafts.values()), default=-1)
            self._costs.learn(rows, columns, seconds, guesses)
            self._unchecked *= columns > 0

    def _learn_tried(self, id: str, draft: Draft, said: Sequence[int]) -> Tried:
        right = _agreeing(draft.tokens, said)
        tried = Tried(right, len(draft.tokens) - right)
        tally = self._tallies.get(draft.source, Tried(0, 0))
        self._tallies[draft.source] = Tried(tally.right + tried.right, tally.wrong + tried.wrong)
        if draft.source == MODEL and self._guessing is not None and id in self._sources:
            self._guessing.tried(self._sources[id].rate, right, len(draft.tokens))
        return tried

    def _learn_found(self, id: str, said: Sequence[int]) -> None:
        """What was not tried was right or wrong all the same, as far as is known by now."""
        found, draft = self._found[id], self._drafts.get(id)
        is_tried = draft is not None and draft.source == found.source
        tokens = draft.tokens if draft is not None and is_tried else found.tokens[: len(said)]
        self._sources[id].learn(found, _agreeing(tokens, said), len(tokens))


def _is_held(draw: Draw) -> bool:
    """There may be something that the answer must say."""
    return bool(draw.forced) or draw.thoughts is not None or draw.grammar is not None


def _room(row: Row) -> int:
    """How many tokens may be drafted for a row."""
    if row.sparse or not row.request.speculation:
        return 0
    return min(DRAFTED_MAX, row.request.max_tokens - len(row.answered) - 1, row.roof - row.length - 1)


def _agreeing(tokens: Sequence[int], said: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = zip(tokens, said, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
