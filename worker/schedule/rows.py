"""The rows a scheduler plans with, and its plans. Plain values; the scheduler alone changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.parts import Reuse
from worker.contract import Prepared
from worker.pictures import Picture
from worker.prefixes.index import Match
from worker.schedule.pace import Work

Span = tuple[int, int]
"""From a position to before another."""


class Phase(StrEnum):
    """Where a request stands. It moves forward, except that a preempted row waits again.

    `AHEAD`: its prompt has been run with those of others, and it waits for a place. Not every row comes by.
    """

    WAITING = "waiting"
    AHEAD = "ahead"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Row:
    """A request and how far it has come.

    `order`: its priority and the number of its arrival. `tokens`: what is run before it decodes, the prompt
    and, once it was preempted, its answer so far; `prefilled` of them are in its cache. `length`: tokens of
    prompt and answer. `family`: rows of one family have the same prompt, and one of them runs it for all.
    `roof`: the length for which it has reserved `bytes`. `kept`: up to where its prefix is stored; `cuts`:
    positions, in order, at which it is to be stored, whatever else. `held`: what it begins with is on its way
    from the disk. `reuse`: what was restored of it when it was first run. `scored`: so many of its prompt's
    tokens have the likelihoods that are asked of them, or are asked none. `preemptions`: it gave way
    so often. `pictures`: its images, in order; `viewed`: up to where they were counted; `looked`: those that
    were encoded for its sake and not used since. `sparse`: parts of its prompt are not run, those of
    `left_out`, once they are known.
    """

    request: Prepared
    order: tuple[int, int]
    family: int
    digest: int
    tokens: tuple[int, ...]
    length: int
    phase: Phase = Phase.WAITING
    prefilled: int = 0
    answered: list[int] = field(default_factory=list)
    bytes: int = 0
    roof: int = 0
    kept: int = 0
    cuts: list[int] = field(default_factory=list)
    held: bool = False
    reuse: Reuse | None = None
    scored: int = 0
    preemptions: int = 0
    pictures: tuple[Picture, ...] = ()
    viewed: int = 0
    looked: set[str] = field(default_factory=set)
    sparse: bool = False
    left_out: tuple[Span, ...] = ()

    @property
    def is_scored(self) -> bool:
        """Nothing is left to be found out of its prompt."""
        return self.scored >= len(self.request.tokens)

    @property
    def reusable(self) -> int:
        """So many of its tokens need not be run: all but the last, and as far as their likelihoods are known,
        each of which takes running the token before it."""
        return len(self.tokens) - 1 if self.is_scored else max(self.scored - 1, 0)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def left(self) -> int:
        """Tokens to run before the row can start: all but the last."""
        skipped = sum(last - first for first, last in self.left_out if first >= self.prefilled)
        return len(self.tokens) - 1 - self.prefilled - skipped

    def beyond(self, position: int) -> int:
        """The position from which on the row is run, once it has been up to this one."""
        return next((last for first, last in self.left_out if first == position), position)

    def gap(self, position: int) -> int:
        """How many tokens are left out just before a position."""
        return next((last - first for first, last in self.left_out if last == position), 0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one row's tokens. `last`: it starts to decode after it, and so do its `copies`. `match`: a
    stored prefix that is restored before; the tokens are those behind it. All that is left, and not `last`:
    the row has no place yet."""

    row: Row
    tokens: tuple[int, ...]
    last: bool
    copies: tuple[Row, ...] = ()
    match: Match | None = None

    @property
    def begin(self) -> int:
        """The position of its first token, before it has run."""
        return self.row.prefilled if self.match is None else self.match.length


Group = Sequence[Chunk]
"""Chunks that are run in one call. Of several, each is the whole of its row, or all begin at one position
and have one length."""


@dataclass(frozen=True, slots=True)
class Look:
    """An image to be encoded, because `row` can be run no further without. Those of the digests `forgotten`
    make room for it."""

    row: Row
    picture: Picture
    forgotten: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows a decode step: drop the caches of the `preempted`, then run the groups in order. With a
    `look`, no group has tokens to run: the row of the look begins, if it has not."""

    groups: Sequence[Group] = ()
    preempted: Sequence[Row] = ()
    look: Look | None = None


def work_of(group: Group) -> Work:
    """What running a group costs, padding included. To be asked before it has run."""
    width = max(len(chunk.tokens) for chunk in group)
    return Work.call(len(group), width, group[0].begin) if width else Work()
