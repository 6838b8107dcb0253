"""Rows that are fed more than they are known to say: what follows is drafted, and kept where it is right.

A row is fed what it has said and its caches do not have yet, its *backlog*, and drafts of what it may say
next. The draws behind these are made one position after the other, each as it would be without drafts, when
the token before it is known: a draft that is what was drawn makes the next position known as well. So no
token is another than it would have been, whatever a draw depends on.

The host reads each draw before the next; nothing runs meanwhile. That costs a row nothing but the pause, and
spares it forward passes. Where no row's draw depends on the tokens before it, greedy ones for instance, all
columns are drawn at once and read once; what stands behind a wrong draft is then not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.contract import Drawn, Step
from worker.engine.caches import grouping
from worker.engine.caches.ahead import AheadBatch
from worker.engine.caches.batch import RowCaches
from worker.engine.caches.ragged import FED_MAX
from worker.engine.group import Company, Member, shifts_of
from worker.engine.hearing import Ear
from worker.engine.sampling.helpers import Helpers
from worker.engine.sampling.sampler import Agree, Sampler

DRAWN_VALUES_MAX = 4 * 2**20
"""From so many logits tokens that are not greedy are drawn at once: most of them may not be looked at."""
QUIET_STEPS = 16
"""Rows that no drafts were made for so long decode without waiting again."""


@dataclass(slots=True)
class Said:
    """What a row has said in a step. `failure`: why it says no more."""

    drawn: list[Drawn] = field(default_factory=list)
    failure: Exception | None = None


class AheadGroup(Company):
    """Rows that decode in one forward pass, drafts and all."""

    def __init__(
        self, model: nn.Module, fresh: Callable[[], RowCaches], ear: Ear, agree: Agree | None = None
    ) -> None:
        """`fresh` makes empty caches of a single row. `ear`: is told of what stays in the caches.
        `agree`: see `Sampler`."""
        self._agree = agree
        self.members: list[Member] = []
        self.quiet = 0
        """Steps since drafts were made for any row."""
        self._model = model
        self._fresh = fresh
        self._ear = ear
        self._batch = AheadBatch(fresh())
        self._backlogs: list[list[int]] = []
        self._sampler: Sampler | None = None
        self._wide: dict[int, Sampler] = {}
        """By their width, samplers of as many columns of all rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return self._batch.nbytes

    # --- a step ---

    def run(self, drafts: Mapping[str, Sequence[int]], helpers: Helpers) -> dict[str, Said]:
        """Feed every row its backlog and its drafts, as far as there is room; what each says then, one token
        at least, if nothing fails."""
        guesses = [self._guess(row, drafts.get(member.name, ())) for row, member in enumerate(self.members)]
        self.quiet = 0 if any(guesses) else self.quiet + 1
        logits = self._fed(guesses)
        said = self._drawn(logits, guesses, helpers)
        self._settle(said)
        return {member.name: each for member, each in zip(self.members, said, strict=True)}

    def _guess(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        return drafts[: FED_MAX - len(self._backlogs[row])]

    def _fed(self, guesses: Sequence[Sequence[int]]) -> mx.array:
        """[rows, width, vocabulary]."""
        feeds = [[*backlog, *guess] for backlog, guess in zip(self._backlogs, guesses, strict=True)]
        counts = [len(feed) for feed in feeds]
        width = max(counts)
        tokens = mx.array([[*feed, *[0] * (width - len(feed))] for feed in feeds], mx.uint32)
        self._batch.begin(counts)
        logits: mx.array = self._model(tokens, cache=self._batch.caches, **shifts_of(self.members))
        mx.async_eval(logits, self._batch.finish())
        return logits

    def _drawn(self, logits: mx.array, guesses: Sequence[Sequence[int]], helpers: Helpers) -> list[Said]:
        if self._is_drawn_at_once(logits):
            return self._drawn_at_once(logits, guesses)
        said = [Said() for _ in self.members]
        places = [len(backlog) - 1 for backlog in self._backlogs]
        going = [True] * len(self.members)
        while any(going):
            self._draw(logits, places, going, said, helpers)
            for row, (each, guess) in enumerate(zip(said, guesses, strict=True)):
                count = len(each.drawn)
                going[row] = (
                    going[row]
                    and each.failure is None
                    and count <= len(guess)
                    and each.drawn[-1].token == guess[count - 1]
                )
                places[row] += going[row]
        return said

    def _is_drawn_at_once(self, logits: mx.array) -> bool:
        assert self._sampler is not None
        is_little = self._sampler.is_greedy or logits.size <= DRAWN_VALUES_MAX
        return is_little and self._sampler.is_memoryless

    def _drawn_at_once(self, logits: mx.array, guesses: Sequence[Sequence[int]]) -> list[Said]:
        width, begins = logits.shape[1], [len(backlog) - 1 for backlog in self._backlogs]
        if width not in self._wide:
            rows = [member.row for member in self.members for _ in range(width)]
            self._wide[width] = Sampler(rows, self._agree)
        positions = [
            max(0, member.length + column - begin)
            for member, begin in zip(self.members, begins, strict=True)
            for column in range(width)
        ]
        sampled = self._wide[width](logits.reshape(-1, logits.shape[-1]), positions)
        tokens: Any = sampled.tokens.tolist()
        likelihoods = sampled.likelihoods()
        said = []
        for row, (member, begin, guess) in enumerate(zip(self.members, begins, guesses, strict=True)):
            first = row * width + begin
            right = _agreeing(guess, tokens[first : first + len(guess)])
            places = range(first, first + right + 1)
            said.append(Said([Drawn(tokens[place], likelihoods.get(place)) for place in places]))
            for place in places:
                member.row.saw(tokens[place])
        return said

    def _draw(
        self,
        logits: mx.array,
        places: list[int],
        going: Sequence[bool],
        said: list[Said],
        helpers: Helpers,
    ) -> None:
        """The next token of each row that goes on, from the logits at its place."""
        assert self._sampler is not None
        chosen: mx.array = mx.take_along_axis(logits, mx.array(places)[:, None, None], axis=1)[:, 0]
        positions = [m.length + len(each.drawn) for m, each in zip(self.members, said, strict=True)]
        before = [
            each.drawn[-1].token if each.drawn else backlog[-1]
            for each, backlog in zip(said, self._backlogs, strict=True)
        ]
        drawing = self._sampler.begin(chosen, positions, mx.array(before, mx.uint32), going)
        helpers.run(drawing.questions)
        sampled = self._sampler.finish(drawing, going)
        tokens: Any = sampled.tokens.tolist()
        likelihoods = sampled.likelihoods()
        for row, token in enumerate(tokens):
            if not going[row]:
                continue
            if (failure := self.members[row].row.failure) is not None:
                said[row].failure = failure
                continue
            self.members[row].row.saw(token)
            said[row].drawn.append(Drawn(token, likelihoods.get(row)))

    def _settle(self, said: Sequence[Said]) -> None:
        """What was right stays in the caches, or will be fed again."""
        news = [[drawn.token for drawn in each.drawn] for each in said]
        kept = [
            len(backlog) + max(0, len(new) - 1) for backlog, new in zip(self._backlogs, news, strict=True)
        ]
        self._ear.hear([member.name for member in self.members], kept, self._batch.lengths)
        taken = self._batch.settle(kept)
        self._backlogs = [
            [*backlog, *new][count:] for backlog, new, count in zip(self._backlogs, news, taken, strict=True)
        ]
        for member, new in zip(self.members, news, strict=True):
            member.length += len(new)

    # --- coming and going ---

    def reseat(self, joining: Sequence[Member], fresh: Callable[[], RowCaches]) -> None:
        """Close the holes and take in the joining rows."""
        if not joining and not self.has_holes:
            return
        everybody = [*self.members, *joining]
        order = [row for row, member in enumerate(everybody) if not member.dropped]
        backlogs = [*self._backlogs, *([_token(member)] for member in joining)]
        self._batch.reseat(order, [m.caches for m in joining], [m.length - 1 for m in joining])
        self.members = [everybody[row] for row in order]
        self._backlogs = [backlogs[row] for row in order]
        for member in joining:
            member.token, member.caches = None, []
        self._wide.clear()
        if self._sampler is not None:
            self._sampler.release()
        self._sampler = Sampler([member.row for member in self.members], self._agree)

    def source(self, member: Member) -> tuple[RowCaches, int]:
        """Copies of a row's caches, behind all that it has said, lazily; and its place in them."""
        place = self.members.index(member)
        return self._copied(place, self._backlogs[place]), 0

    def detach(self, fresh: Callable[[], RowCaches]) -> list[Member]:
        """Give every living row its token and caches back, so that it can join another group."""
        for place, member in enumerate(self.members):
            if not member.dropped:
                *late, last = self._backlogs[place]
                member.token, member.caches = mx.array([last], mx.uint32), self._copied(place, late)
        if self._sampler is not None:
            self._sampler.release()
        return self.living

    def _copied(self, place: int, late: Sequence[int]) -> RowCaches:
        """A row's own caches, which are fed what they do not have."""
        own = self._batch.extract(place, self._fresh())
        if late:
            tokens = mx.array([list(late)], mx.uint32)
            self._model(tokens, cache=own, **shifts_of(self.members[place : place + 1]))
        return own


def _agreeing(guess: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = enumerate(zip(guess, drawn, strict=True))
    return next((place for place, (one, other) in pairs if one != other), len(guess))


def _token(member: Member) -> int:
    assert member.token is not None, "it is in no group"
    token: Any = member.token.item()
    return int(token)


class Ahead:
    """All rows of an engine that are fed drafts, in groups of like length."""

    def __init__(
        self, model: nn.Module, fresh: Callable[[], RowCaches], ear: Ear, agree: Agree | None = None
    ) -> None:
        """See `AheadGroup`. `agree`: see `Sampler`."""
        self._agree = agree
        self.groups: list[AheadGroup] = []
        self._model = model
        self._fresh = fresh
        self._ear = ear

    def board(self, members: list[Member]) -> None:
        """Rows whose draws have all been read are fed drafts from now on."""
        lengths = [member.length for member in members]
        for group in self.groups:
            if grouping.ratio([[*lengths, *(m.length for m in group.living)]]) <= grouping.RATIO_MAX:
                break
        else:
            group = AheadGroup(self._model, self._fresh, self._ear, self._agree)
            self.groups.append(group)
        group.reseat(members, self._fresh)

    def reseat(self, joining: list[Member]) -> list[Member]:
        """Close the holes; rows that start join those that are here. Returns who is to decode plainly."""
        for group in self.groups:
            group.reseat([], self._fresh)
        quiet = [group for group in self.groups if group.quiet >= QUIET_STEPS]
        self.groups = [group for group in self.groups if group not in quiet]
        if self.groups and joining:
            self.board(joining)
            joining = []
        return [*joining, *(member for group in quiet for member in group.detach(self._fresh))]

    def let_go(self) -> None:
        """Forget groups that nobody is left in."""
        self.groups = [group for group in self.groups if not group.is_abandoned]

    def run(self, step: Step, drafts: Mapping[str, Sequence[int]], helpers: Helpers) -> Step:
        """A step of all groups, added to `step`, what has been read of other rows and of those that have
        just come."""
        if not self.groups:
            return step
        tokens, likelihoods = dict(step.tokens), dict(step.likelihoods)
        failed, further = dict(step.failed), dict(step.further)
        behind = {row: _behind(tokens.get(row), drafted) for row, drafted in drafts.items()}
        for group in self.groups:
            for row, said in group.run(behind, helpers).items():
                drawn = list(said.drawn)
                if said.failure is not None:
                    failed[row] = said.failure
                if row not in tokens and drawn:
                    tokens[row], likelihood = drawn.pop(0)
                    likelihoods |= {} if likelihood is None else {row: likelihood}
                further[row] = drawn
        return Step(tokens, likelihoods, failed, further)


def _behind(token: int | None, drafted: Sequence[int]) -> Sequence[int]:
    """What was drafted behind a token that has been read since."""
    if token is None:
        return drafted
    return drafted[1:] if drafted and drafted[0] == token else ()
