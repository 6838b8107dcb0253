"""What is known of one request's answer while it is drawn: what it has said, and what it must say."""

from __future__ import annotations

from collections.abc import Sequence

from worker.contract import Draw
from worker.engine.sampling.distribution import mixed
from worker.engine.sampling.forcing import Forced, ThoughtGuard
from worker.engine.sampling.guiding import Held, Masks
from worker.engine.sampling.penalties import Counts, is_penalized
from worker.guides import Foreseen


class Row:
    """What samplers know of one request, from its start to its end."""

    def __init__(self, draw: Draw, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: its prompt, the first `prompt_tokens` of them, and what it has answered already."""
        self.draw = draw
        self.seed = mixed(draw.seed)
        self.counts = Counts(tokens, prompt_tokens) if is_penalized(draw) else None
        self._prompt_tokens = prompt_tokens
        self._answered = len(tokens) - prompt_tokens
        self._guard = ThoughtGuard(draw.thoughts, tokens[prompt_tokens:]) if draw.thoughts else None
        self._held = Held(draw.grammar.open(tokens[prompt_tokens:])) if draw.grammar is not None else None

    @property
    def failure(self) -> Exception | None:
        """Why the row's next token could not be held to its grammar."""
        return self._held.failure if self._held else None

    @property
    def may_force(self) -> bool:
        """Whether some token of the row may have to be another than the drawn one, now or later."""
        return bool(self.draw.forced) or self._guard is not None

    def forced(self, position: int) -> Forced | None:
        """The token that must stand at a position of the sequence, if there is one.

        All that was drawn up to the position before the last must have been `seen`; the last may have been.
        """
        index = position - self._prompt_tokens
        if index < len(self.draw.forced):
            return Forced(self.draw.forced[index])
        return self._guard.forced(index) if self._guard else None

    def ask(self, position: int, masks: Masks, place: int) -> None:
        """Put what the grammar lets stand at a position into a place of `masks`: anything, if one token must.

        All before it must have been `seen`. Called by any thread, by one at a time.
        """
        if self._held is None or self.forced(position) is not None:
            masks.spare(place)
        else:
            masks.ask(place, self._held)

    def foresee(self, most: int) -> Foreseen:
        """How the answer goes on behind what has been `seen`, in at most so many tokens."""
        stands = self.draw.forced[self._answered :] or (self._guard.coming() if self._guard else ())
        if stands:
            return Foreseen(stands[:most], min(most, len(stands)))
        return self._held.foresee(most) if self._held else Foreseen()

    def saw(self, token: int) -> None:
        """The next token of the answer has been read."""
        self._answered += 1
        if self._guard:
            self._guard.saw(token)
        if self._held:
            self._held.saw(token)
