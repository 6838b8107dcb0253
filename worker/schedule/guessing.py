"""A network's guesses: for whom they are asked, what is read before, and what that may cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.contract import Step
from worker.schedule.choices import DRAFTED_MAX, Choice, Choices
from worker.schedule.following import Following
from worker.schedule.known import Known
from worker.schedule.lookup import Draft
from worker.schedule.odds import Costs, Rate
from worker.schedule.rows import Row
from worker.schedule.trust import Trust

CREDIT_FIRST, CREDIT_MAX, CREDIT_STEP = 128.0, 512.0, 0.02
"""What guesses may cost before they have brought as much, in plain steps: at first, and at the most; each
step adds so much."""
ANSWER_TOKENS = 256
"""For so many tokens that may still come a prompt is read; for as many as have come, if those are more."""
_TRIED_SHARE = 1 / 2
"""While it is not known what guesses bring, they are taken to spare so much of the time of what may come."""


class Guessing:
    """Who guesses, and what came of it. `passes`: of the network in the step that is under way."""

    def __init__(
        self, following: Following, choices: Choices, costs: Costs, sources: Mapping[str, Known]
    ) -> None:
        """`sources`: what is known of each row."""
        self.passes = 0
        self._following = following
        self._choices = choices
        self._costs = costs
        self._sources = sources
        self._trust = Trust()
        self._credit = CREDIT_FIRST
        self._beside: dict[str, tuple[int, ...]] = {}
        """What was guessed beside steps, and not been compared yet."""
        self._is_beside = False
        """Guesses were made beside the step that is under way."""
        self._is_warm = False
        """The last step had guesses: nothing was compiled for this one, and nobody changes places."""

    @property
    def is_open(self) -> bool:
        """Guesses may be asked for now."""
        return self._credit > 0 and not self._trust.is_resting

    def begin(self) -> None:
        """A step comes."""
        self.passes, self._is_beside = 0, False

    # --- what is tried ---

    def better(
        self, choice: Choice, found: dict[str, Draft], rooms: Mapping[Row, int], rows: int, *, may_read: bool
    ) -> Choice:
        """A better choice, if guesses make one; these are added to what was `found`. `may_read`: nothing else
        is run meanwhile."""
        open_ = {row: room for row, room in rooms.items() if self._following.knows(row)}
        if not open_ or not self._costs.knows(rows):
            return choice
        for row in open_:
            if not (known := self._sources[row.id]).has_begun:
                known.has_begun = True
                self._following.begin(row)
        if self._trust.is_tried:
            if may_read and not choice.length:
                self._try(list(open_), rows)
            return choice
        if not self._choices.best({}, rows, open_).asked:
            self._trust.vain()
            return choice
        return self._used(choice, found, open_, rows, may_read=may_read)

    def _used(
        self, choice: Choice, found: dict[str, Draft], rooms: Mapping[Row, int], rows: int, *, may_read: bool
    ) -> Choice:
        near = {row: room for row, room in rooms.items() if self._following.is_near(row)}
        better = self._choices.best(found, rows, near) if near else choice
        if may_read and len(near) < len(rooms):
            self._read(max(choice.speed, better.speed), found, rooms, rows)
        if better.speed <= choice.speed:
            return choice
        guesses = self._following.guess(better.asked, better.length)
        found |= {row.id: guesses[row.id].first(rooms[row]) for row in better.asked if row.id in guesses}
        self.passes = better.length
        self._trust.used()
        return better

    def _read(self, speed: float, found: Mapping[str, Draft], rooms: Mapping[Row, int], rows: int) -> None:
        """Have a chunk of a row read that cannot be guessed for yet, if that is going to pay."""
        hoped = self._choices.best(found, rows, rooms)
        late = [row for row in hoped.asked if not self._following.is_near(row)]
        if hoped.speed > speed and late:
            self._read_if_it_pays(late, rows, 1 - rows / hoped.speed)

    def _read_if_it_pays(self, late: list[Row], rows: int, spared: float) -> None:
        late.sort(key=self._following.late)
        left = min(max(ANSWER_TOKENS, len(row.answered)) for row in late)
        left = min(left, *(row.request.max_tokens - len(row.answered) for row in late))
        gain = min(self._credit, left * spared)
        if sum(map(self._following.seconds, late)) < gain * self._costs.plain(rows):
            self._following.read(late)

    def _try(self, rows: Sequence[Row], decoding: int) -> None:
        """Guess for rows that are near, feeding nobody; or read what comes soonest."""
        if self._beside:
            return  # a block of them, which comes one by one
        near = [row for row in rows if self._following.is_near(row)]
        if near:
            count = min(self._following.block, DRAFTED_MAX)
            guesses = self._following.guess(near, count)
            self._beside = {id: draft.tokens for id, draft in guesses.items() if draft.tokens}
            self.passes, self._is_beside = count, True
        else:
            self._read_if_it_pays([min(rows, key=self._following.late)], decoding, _TRIED_SHARE)

    # --- what came of it ---

    def learn(self, step: Step) -> None:
        """What was drawn in place of what was guessed beside the step."""
        for id, tokens in list(self._beside.items()):
            del self._beside[id]
            if id not in self._sources or id not in step.tokens:
                continue
            is_right = tokens[0] == step.tokens[id]
            self.tried(self._sources[id].rate, int(is_right), 1)
            self._trust.tried(1, 0.0)
            if is_right and len(tokens) > 1 and not step.further.get(id):
                self._beside[id] = tokens[1:]

    def tried(self, rate: Rate, right: int, count: int) -> None:
        """Of so many guesses for the row of this rate so many were right."""
        self._following.learn(rate, right, count)

    def lap(self, seconds: float | None, gained: float, plain: float) -> bool:
        """A step that brought each row so many tokens took so long; None: that says nothing. `plain`: seconds
        of a plain one, 0: not known. Whether what it took is to be learned from, as far as this goes."""
        has_read, was_warm = self._following.has_read, self._is_warm
        self._following.lap(seconds)
        self._is_warm = self.passes > 0
        if seconds is not None and plain and (self.passes or has_read):
            self._credit += gained - seconds / plain
        if self._is_beside and seconds is not None and plain:
            self._trust.tried(0, seconds / plain - gained)
        self._credit = min(self._credit + CREDIT_STEP, CREDIT_MAX)
        if self._trust.pass_():
            # Guesses may have been bad, or dear because the machine was busy.
            self._costs.forget_guessed()
            self._following.doubt()
        return not has_read and (was_warm or not self.passes)
