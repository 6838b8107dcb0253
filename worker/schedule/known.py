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
EMPTY_LOOKUPS = 32
"""So where nothing was found so often on end: looking takes the host 1 to 3% of a step of a small model."""


@dataclass(slots=True)
class Known:
    """What is known of a row, whose answer had `seen` tokens when it was last looked at. `rate`: how often
    guesses for it are right; `is_held`: it is held to something; `held`: how often that came as it was
    foreseen."""

    lookup: Lookup
    rate: Rate
    seen: int = 0
    is_held: bool = False
    odds: Odds = field(default_factory=Odds)
    held: Rate = field(default_factory=partial(Rate, HELD_TO))
    vain: int = 0
    """Drafts on end that were looked up and not right at all."""
    empty: int = 0
    """Lookups on end that found nothing."""
    has_begun: bool = False
    """Who guesses has been told of it."""

    def is_due(self, said: int) -> bool:
        """Whether it is to be looked up what follows so many tokens of its answer."""
        is_seldom = self.vain >= VAIN_LOOKUPS or self.empty >= EMPTY_LOOKUPS
        return not is_seldom or said % SELDOM_TOKENS == 0

    def look_up(self, room: int) -> Draft:
        """What was looked up, at most so many tokens; nothing, if it is not due."""
        if not self.is_due(self.seen):
            return NO_DRAFT
        draft = self.lookup.propose(room)
        self.empty = 0 if draft.tokens else self.empty + 1
        return draft

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
