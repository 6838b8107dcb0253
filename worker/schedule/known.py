"""What is known of a row that is drafted for: what it said, and how often drafts for it were right. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from worker.schedule.following import MODEL
from worker.schedule.lookup import Draft, Lookup
from worker.schedule.odds import HELD_TO, Odds, Rate, expected

HELD = "held"
"""The source of drafts made of what an answer must say."""


@dataclass(slots=True)
class Known:
    """What is known of a row, whose answer had `seen` tokens when it was last looked at. `rate`: how often
    guesses for it are right; `held`: how often what it is held to came as it was foreseen."""

    lookup: Lookup
    rate: Rate
    seen: int = 0
    odds: Odds = field(default_factory=Odds)
    held: Rate = field(default_factory=partial(Rate, HELD_TO))

    def expected(self, draft: Draft, count: int) -> float:
        """How many of so many of its tokens are right."""
        match draft.source:
            case source if source == MODEL:
                odds = self.rate.value
            case source if source == HELD:
                odds = self.held.value
            case _:
                odds = self.odds.of(draft.matched)
        return expected(odds, min(count, len(draft.tokens)), draft.certain)

    def learn(self, draft: Draft, right: int, tried: int) -> None:
        """Of so many of its tokens so many were right. Of those that are certain nothing is learned."""
        if draft.source != HELD:
            self.odds.learn(draft.matched, right, tried)
        elif right >= draft.certain and tried > draft.certain:
            self.held.learn(right - draft.certain, tried - draft.certain)
