"""Prefix reuse: from the prefix cache, and between rows that are being prefilled. Pure.

A row is looked up when its turn for prefill has come, so that what others store until then counts. A row that
shares a prefix with one further along waits for that one to store it, if this saves enough.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from worker.common_prefix import common_prefix_length
from worker.core.prefix.index import Match, PrefixIndex
from worker.core.rows import Row
from worker.values import MessageEnd

SHORT_TOKENS_MAX = 256
"""Maximum tokens left to prefill of a prompt that may run together with others."""
LONG_TOKENS = 8192
"""Interval of snapshots in a long prefill, if the model has recurrent layers."""
REUSED_TOKENS_MIN = 16
"""Minimum length of a prefix that is restored: shorter prompts rather run together."""
AWAITED_TOKENS_MIN = 128
"""Minimum number of saved tokens for which a row waits."""
CUT_NEAR = 32
"""A snapshot also serves rows that share up to this many tokens beyond it."""
CUTS_MAX = 16
"""Maximum snapshot positions of a row."""

OFF, REQUEST = "off", "request"
"""Miss reasons: there is no prefix cache; the request needs its prompt to run, for its logprobs or for sparse
prefill, or the prompt is too short."""


class Sharing:
    """Prefix reuse of a scheduler's rows, over the prefix cache's `index`."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def begin(self, row: Row) -> None:
        """Set the snapshot positions of a new row, if the model has recurrent layers.

        Short text prompts have none, being cheap to run. The end of the last image is one, because the next
        request may ask another question about it.
        """
        if self._index.shape.has_states and (row.images or len(row.tokens) > SHORT_TOKENS_MAX):
            behind = (image.end for image in row.images[-1:])
            regular = range(LONG_TOKENS, len(row.tokens), LONG_TOKENS)
            row.snapshot_positions = sorted({*row.request.boundaries, *behind, *regular})

    def miss(self, row: Row) -> str:
        """Return why no longer prefix of the row is reused."""
        if not row.is_scored:
            return REQUEST
        match = self._look_up(row)
        return match.miss or ("" if _is_worth_it(row, match) else REQUEST)

    def missed_message(self, row: Row) -> tuple[int | None, str]:
        """Return number and role of the message in which the row's prompt diverges from all stored ones; None
        if it is behind the messages before the last answer."""
        return message_at(row.request.message_ends, self._look_up(row).known)

    def ready(self, heads: Iterable[Row], begun: Iterable[Row]) -> dict[Row, Match | None]:
        """Return the rows of `heads` that need not wait for another, each with the stored prefix to restore.

        A row in prefill waits for none; another one only for rows before it and those in `begun`. So they
        never wait in a cycle.
        """
        ahead = list(begun)
        ready: dict[Row, Match | None] = {}
        for row in heads:
            row.waits_for = None
            if row.prefilled:
                ready[row] = None
            elif other := self._awaited(row, ahead):
                row.waits_for = other.id
            else:
                ready[row] = self._find(row)
            ahead.append(row)
        return ready

    def _find(self, row: Row) -> Match | None:
        """Return the stored prefix that a row without caches can begin with; None if none is worth it."""
        match = self._look_up(row)
        return match if _is_worth_it(row, match) else None

    def _awaited(self, row: Row, others: Iterable[Row]) -> Row | None:
        """Return the first of `others`, which run before `row`, that will soon store a much longer prefix.

        If the prefix needs a recurrent state, a snapshot position is added to the other row.
        """
        if len(row.tokens) <= AWAITED_TOKENS_MIN or row.never_waits:
            return None
        there = self._look_up(row).length
        for other in others:
            if (
                other is row
                or other.prompt_group == row.prompt_group
                or other.request.salt != row.request.salt
            ):
                continue
            if other.is_private or (other.is_batch and not row.is_batch):
                continue  # stores nothing, or may be preempted first
            until = min(self._shared(row, other), row.reusable)
            if until - there >= AWAITED_TOKENS_MIN and self._promises(other, until):
                return other
        return None

    def _promises(self, other: Row, until: int) -> bool:
        """Return whether the prefix up to about `until` will be stored; schedule a snapshot if needed."""
        if not self._index.shape.has_states:
            return other.stored_upto < until
        if any(other.prefilled < cut <= until < cut + CUT_NEAR for cut in other.snapshot_positions):
            return True
        if other.prefilled >= until or len(other.snapshot_positions) >= CUTS_MAX:
            return False
        bisect.insort(other.snapshot_positions, until)
        return True

    def _look_up(self, row: Row) -> Match:
        if row.seen is None or row.seen[0] != self._index.version:
            match = self._index.find(row.tokens, salt=row.request.salt, limit=row.reusable, ram_only=True)
            row.seen = self._index.version, match
        return row.seen[1]

    @staticmethod
    def _shared(row: Row, other: Row) -> int:
        if other.digest not in row.common:
            row.common[other.digest] = common_prefix_length(row.tokens, other.tokens)
        return row.common[other.digest]


def message_at(ends: Sequence[MessageEnd], position: int) -> tuple[int | None, str]:
    """Return number and role of the message at a position; None behind all, and where two end as one."""
    positions = [end.position for end in ends]
    number = bisect.bisect_left(positions, position)
    if number == len(ends) or positions[number] in positions[number + 1 : number + 2]:
        return None, ""
    return number, ends[number].role


def _is_worth_it(row: Row, match: Match) -> bool:
    """Return whether a match is worth restoring.

    Any match that covers an image is: prompts with images run alone, and it saves encoding the image.
    """
    reaches_image = bool(row.images) and match.length >= row.images[0].end
    return match.length >= REUSED_TOKENS_MIN or reaches_image
