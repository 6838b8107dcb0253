"""What a network that drafts is asked, and when it reads. Pure: seconds are handed in.

It guesses for rows whose tokens it has read, all but a few. With others it catches up between the steps, a
chunk of one row at a time, as large as leaves room for the step: streams keep their pace.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.drafts import LATE_MAX, Drafter
from worker.schedule.lookup import Draft
from worker.schedule.odds import Rate
from worker.schedule.pace import Pace, Work
from worker.schedule.recall import Recall
from worker.schedule.rows import Row

MODEL = "model"
READ_SHARE = 0.5
"""Of the time between two tokens of a stream, what reading leaves a step."""
READ_TOKENS_MAX = 2048
"""Read at once at the most."""
DOUBTED_READS = 2
"""So many of the first say nothing of how long others take: something was compiled."""
USUAL = 0.7
"""How often a guess is right while nothing is known."""
_FADING = 0.1
"""Of what is known of all guesses, so much is left when it is tried again whether they pay."""


class Following:
    """A drafter, and what is known of it."""

    def __init__(self, drafter: Drafter, target_s: float, recall: Recall | None = None) -> None:
        """`target_s`: between two tokens of a running stream. `recall`: what the drafter has read before;
        None: nothing is kept."""
        self.share, self.block = drafter.share, drafter.block
        self._drafter = drafter
        self._pace = Pace(target_s=READ_SHARE * target_s, tokens_max=READ_TOKENS_MAX)
        self._recall = recall
        self._rate = Rate(USUAL)
        self._read = Work()
        self._reads = 0

    def open(self) -> Rate:
        """How often guesses for a new row are right."""
        return Rate(USUAL, self._rate)

    def doubt(self) -> None:
        """Guesses have not paid for long: they may now."""
        self._rate.fade(_FADING)

    def begin(self, row: Row) -> None:
        """The row is to be read, but for what was read before of one that begins alike."""
        if self._recall is not None:
            self._recall.restore(row)

    def knows(self, row: Row) -> bool:
        """It could guess for the row, once it has caught up with it."""
        # One that goes by what the model thinks may begin at a token that has not been told yet.
        return not row.pictures and self._drafter.knows(row.id) and self.late(row) > 0

    def is_near(self, row: Row) -> bool:
        """It could guess for the row at once."""
        return self.late(row) <= LATE_MAX

    def late(self, row: Row) -> int:
        """So many of the row's tokens it has not read."""
        return row.length - self._drafter.length(row.id)

    def seconds(self, row: Row) -> float:
        """How long it takes to catch up with the row; 0: nobody knows yet."""
        if self._reads < DOUBTED_READS:
            return 0.0
        return self._pace.seconds(Work.call(1, self.late(row), self._drafter.length(row.id)))

    def guess(self, rows: Sequence[Row], count: int) -> dict[str, Draft]:
        """So many tokens for each of these, to which it is near."""
        news = {row.id: _behind(row, self._drafter.length(row.id)) for row in rows}
        return {
            id: Draft(tuple(tokens), source=MODEL) for id, tokens in self._drafter.draft(news, count).items()
        }

    def read(self, rows: Sequence[Row]) -> None:
        """Catch up with these rows, in order, as far as there is time; with the first by a chunk at least."""
        budget = self._pace.budget(decoding=True)
        for row in rows:
            done = self._drafter.length(row.id)
            count = budget.cut(row.length - done - 1, done)
            if not count:
                return
            if self._recall is not None:
                count = self._recall.until(row, done, count)
            self._drafter.read(row.id, _behind(row, done)[:count])
            if self._recall is not None:
                self._recall.has_read(row)
            budget.spend(Work.call(1, count, done))
            self._read = budget.spent

    @property
    def has_read(self) -> bool:
        """Something was read since the last lap."""
        return self._read.calls > 0

    def lap(self, seconds: float | None) -> None:
        """A step has ended, reading included; None: that says nothing."""
        if seconds is not None:
            self._pace.learn(seconds, decoded=True, work=self._read)
            self._reads += self.has_read
        self._read = Work()

    def learn(self, rate: Rate, right: int, tried: int) -> None:
        """Of so many guesses for the row of this rate so many were right."""
        rate.learn(right, tried)
        self._rate.learn(right, tried)


def _behind(row: Row, count: int) -> tuple[int, ...]:
    """The row's tokens behind so many. Those of an answer may be more than `row.tokens` has of them."""
    prompt = row.request.tokens
    if count < len(prompt):
        return (*prompt[count:], *row.answered)
    return tuple(row.answered[count - len(prompt) :])
