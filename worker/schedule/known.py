"""What is known of a row that is drafted for: what it said, and how often drafts for it were right. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from worker.schedule.following import MODEL
from worker.schedule.lookup import NO_DRAFT, Draft, Lookup
from worker.schedule.odds import HELD_TO, Odds, Rate, expected

HELD = "held"
"""The source of drafts made of what an answer must say."""
VAIN_LOOKUPS = 8
"""Where so many drafts on end were wrong from their first token, it is looked up less often."""
SELDOM_TOKENS = 4
"""At one in so many tokens of the answer."""


@dataclass(slots=True)
class Known:
    """What is known of a row, whose answer had `seen` tokens when it was last looked at. `rate`: how often
    guesses for it are right; `held`: how often what it is held to came as it was foreseen."""

    lookup: Lookup
    rate: Rate
    seen: int = 0
    odds: Odds = field(default_factory=Odds)
    held: Rate = field(default_factory=partial(Rate, HELD_TO))
    vain: int = 0
    """Drafts on end that were looked up and not right at all."""
    has_begun: bool = False
    """Who guesses has been told of it."""

    def look_up(self, room: int) -> Draft:
        """What was looked up, at most so many tokens."""
        if self.vain >= VAIN_LOOKUPS and self.seen % SELDOM_TOKENS:
            return NO_DRAFT
        return self.lookup.propose(room)

    def odds_of(self, draft: Draft) -> float:
        """How likely each of its tokens is right, if all before it are, but for those that are certain."""
        match draft.source:
            case source if source == MODEL:
                return self.rate.value
            case source if source == HELD:
                return self.held.value
        return self.odds.of(draft.matched)

    def expected(self, draft: Draft, count: int) -> float:
        """How many of so many of its tokens are right."""
        return expected(self.odds_of(draft), min(count, len(draft.tokens)), draft.certain)

    def learn(self, draft: Draft, right: int, tried: int) -> None:
        """Of so many of its tokens so many were right. Of those that are certain nothing is learned."""
        if draft.source != HELD:
            self.vain = 0 if right else self.vain + 1
            self.odds.learn(draft.matched, right, tried)
        elif right >= draft.certain and tried > draft.certain:
            self.held.learn(right - draft.certain, tried - draft.certain)
