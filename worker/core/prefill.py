"""Prefill of a step: which prompts run, how much of each, which in one call, and what that costs. Pure.

Rows of one family have the same prompt: one of them runs it, and the others become copies. Short prompts run
together while little of the call is padding, and so do the short ends of prompts whose stored prefixes have
one length. Longer prompts run one after another. Prompts with images run alone, up to their next image that
is not cached. While a long prompt is first, admitted short ones go before it in every other step.

The budget is the time that the inter-token target leaves beside a decode step, divided by the seconds per
token. Those grow with the context, so there is one moving average for each power of two of it. A short call
takes its time to read the weights and says little about longer ones: it counts in proportion to its tokens.
An outlier (compilation, a busy machine) does not stop prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.core.encoder_cache import EncoderCache
from worker.core.prefix.index import Match
from worker.core.prefix.sharing import SHORT_TOKENS_MAX
from worker.core.rows import CHUNK_TOKENS_MIN, Chunk, Group, Row

PADDING_MAX = 0.25
"""Maximum share of padding in a call with several rows."""

Heads = Mapping[Row, Match | None]
"""Rows to run, in order, each with the stored prefix it begins with."""


def form_groups(
    line: Sequence[Row], heads: Heads, budget: PrefillBudget, encoder_cache: EncoderCache
) -> list[Group]:
    """Form the groups of one plan, within the budget. `heads`: leads of `line`."""
    waiting = dict(heads)
    groups: list[Group] = []
    while waiting:
        head = next(iter(waiting))
        match = waiting.pop(head)
        begin = begin_of(head, match)
        open_ = encoder_cache.reach(head, begin) - begin
        if not open_ and _rest_of(head, match):
            continue  # waits for an image to be encoded
        size = budget.chunk_length(open_, begin)
        if open_ and not size:
            break
        size = min([size, *(cut - begin for cut in head.cuts_behind(begin))])
        group = [_chunk(head, match, size, line)]
        for row in _joining(head, match, waiting, budget) if is_short(head, match) else []:
            stored = waiting.pop(row)
            group.append(_chunk(row, stored, _rest_of(row, stored), line))
        budget.spent.append(call_of(group))
        groups.append(group)
    return groups


def call_of(group: Group) -> PrefillCall:
    """Return the call that runs a group, padding included. Valid only before the group has run."""
    return PrefillCall(len(group) * max(len(chunk.tokens) for chunk in group), group[0].begin)


def leads_of(line: Iterable[Row]) -> dict[int, Row]:
    """Return, by family, the row that runs the prompt for all of it: the first of those furthest along."""
    leads: dict[int, Row] = {}
    for row in line:
        lead = leads.setdefault(row.prompt_group, row)
        if row.prefilled > lead.prefilled:
            leads[row.prompt_group] = row
    return leads


def overtaking(heads: Heads) -> list[Row]:
    """Return the short prompts that may go before the first of `heads`, if that one is long.

    They have its priority. What is restored of a prompt does not count.
    """
    first = next(iter(heads), None)
    if first is None or not _is_long(first, heads[first]):
        return []
    return [
        row
        for row, match in heads.items()
        if row.request.priority == first.request.priority and not row.images and not _is_long(row, match)
    ]


def is_short(row: Row, match: Match | None) -> bool:
    """Return whether all of the prompt behind its stored prefix may be run in one call with others."""
    begin = begin_of(row, match)
    is_plain = not row.prefilled and not row.cuts_behind(begin) and not row.images
    return is_plain and 0 < _rest_of(row, match) <= SHORT_TOKENS_MAX


def begin_of(row: Row, match: Match | None) -> int:
    """Return the position from which a row is run, after the stored prefix it begins with."""
    return match.length if match else row.prefilled


def _is_long(row: Row, match: Match | None) -> bool:
    return _rest_of(row, match) > SHORT_TOKENS_MAX


def _rest_of(row: Row, match: Match | None) -> int:
    """Return the number of tokens to run of a prompt behind its stored prefix. Nothing of it was skipped."""
    return len(row.tokens) - 1 - begin_of(row, match)


def _chunk(row: Row, match: Match | None, size: int, line: Sequence[Row]) -> Chunk:
    """Return the next chunk of a row; behind the last one, the others of its family in `line` are copies."""
    begin = begin_of(row, match)
    last = size == _rest_of(row, match)
    copies = (other for other in line if last and other.prompt_group == row.prompt_group and other is not row)
    return Chunk(row, row.tokens[begin : begin + size], last, tuple(copies), match)


def _joining(head: Row, match: Match | None, others: Heads, budget: PrefillBudget) -> list[Row]:
    """Return short prompts to run in one call with `head`: at its position and near enough in length, first
    those of highest priority and most alike. None if `head` is cut."""
    found: list[Row] = []
    begin, real = begin_of(head, match), _rest_of(head, match)
    width = real
    able = {
        row: _rest_of(row, stored)
        for row, stored in others.items()
        if is_short(row, stored) and begin_of(row, stored) == begin
    }
    unlike = {row: abs(rest - real) for row, rest in able.items()}
    for row in sorted(able, key=lambda row: (row.request.priority, unlike[row])):
        rest = able[row]
        widest, rows = max(width, rest), 2 + len(found)
        padding = 1 - (real + rest) / (widest * rows)
        if padding < PADDING_MAX and budget.holds(PrefillCall(rows * widest, begin)):
            found.append(row)
            real, width = real + rest, widest
    return found


CHUNK_TOKENS_FIRST = 64
"""Maximum tokens of a step until one was measured. Longer calls cost less per token, so they may follow."""
CONTEXT_TOKENS_MIN = 1024
"""Tokens cost the same in all shorter contexts."""
IDLE_S = 1.0
"""Time budget of a step when no row decodes: a cancel waits as long."""
PREFILL_SHARE, CALL_SHARE = 3.0, 5.0
"""Time for prefill as a multiple of the decode step, and of the shortest one, even if the target leaves less.
A decode step takes little longer for many rows than for one, so it pays to start rows soon, and a call reads
all weights, as a step does, before it computes anything. Where decoding alone takes the target, requests
complete in half of the time that a multiple of 0.3 gives them (measured with bench/schedules.py)."""
PAUSES_MAX = 3
"""Maximum number of steps without prefill in which the first decode step is measured."""
MARGIN = 1.2
"""Ratio of measured to predicted seconds that is allowed for. One that was learned settled between 1.15 and
1.25 in bench/schedules.py, whose steps have a noise of 5%."""
_RATE, _ERROR_MAX = 0.4, 0.5
"""Weight of a measurement in the average, and the largest error, as a share of the average."""


class PrefillCall(NamedTuple):
    """A call of the engine. `tokens`: of all its rows, padding included. `context`: tokens in each cache."""

    tokens: int
    context: int


class PrefillCostModel:
    """Learned cost of prefill and decoding. Deterministic: the caller passes in measured seconds."""

    def __init__(self, *, target_s: float, tokens_max: int, gap_s_max: float = math.inf) -> None:
        """`target_s`: between two tokens of a running stream. `tokens_max`: prefill tokens in one step.
        `gap_s_max`: bound of a gap where decode steps take so long that prefill exceeds the target."""
        self._target_s, self._gap_s_max = target_s, max(target_s, gap_s_max)
        self._tokens_max = tokens_max
        self._token_times: dict[int, float] = {}
        """Seconds per token, by power of two of the context."""
        self._decode_times: dict[int, float] = {}
        """Seconds of a decode step, by power of two of its rows."""
        self.rows = 0
        """Number of rows that decode now."""
        self._pauses = 0

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step of `rows` rows, or of the nearest number measured; 0 without any."""
        power = self.rows.bit_length()
        return min(self._decode_times.items(), key=lambda known: abs(known[0] - power), default=(0, 0.0))[1]

    @decode_s.setter
    def decode_s(self, seconds: float) -> None:
        """Set the seconds of a decode step that was measured elsewhere."""
        self._decode_times[self.rows.bit_length()] = seconds

    def token_s(self, context: int) -> float:
        """Return the seconds per token after `context`; 0 until something has been measured.

        Far beyond the contexts measured they are taken to grow in proportion, which is the most they can.
        """
        if not self._token_times:
            return 0.0
        nearest = min(self._token_times, key=lambda known: abs(known - _power(context)))
        return self._token_times[nearest] * 2.0 ** max(0, _power(context) - nearest - 1)

    def seconds(self, calls: Iterable[PrefillCall]) -> float:
        """Return the predicted seconds of `calls`; 0 until something has been measured."""
        return sum(call.tokens * self.token_s(call.context) for call in calls)

    def pauses_prefill(self) -> bool:
        """Return whether to run the next decode step without prefill, because none has been measured.

        In a burst every decode step may have prefill beside it, for many seconds. True at most `PAUSES_MAX`
        times.
        """
        if self._decode_times or not self._token_times or self._pauses >= PAUSES_MAX:
            return False
        self._pauses += 1
        return True

    def budget(self, *, decoding: bool, may_wait: bool = False) -> PrefillBudget:
        """Return the prefill budget of the next step. `may_wait`: rows that decode may wait."""
        known_max = self._tokens_max if self._token_times else CHUNK_TOKENS_FIRST
        room_s = self._room_s(may_wait=may_wait) if decoding else IDLE_S
        return PrefillBudget(self, room_s, min(self._tokens_max, known_max))

    def _room_s(self, *, may_wait: bool) -> float:
        """Return the seconds for prefill beside a decode step: as many as that takes in any case, and all
        that the bound of a gap leaves if its rows `may_wait`."""
        decode_s = self.decode_s
        longest_s = self._gap_s_max / MARGIN - decode_s
        if may_wait and self._gap_s_max < math.inf:
            return max(longest_s, decode_s)
        worth_s = max(PREFILL_SHARE * decode_s, CALL_SHARE * min(self._decode_times.values(), default=0.0))
        return max(self._target_s / MARGIN - decode_s, min(worth_s, longest_s), decode_s)

    def learn(self, seconds: float, *, decoded: bool, calls: Sequence[PrefillCall] = ()) -> None:
        """Record the seconds that `calls` and, if `decoded`, one decode step took together.

        The two cannot be measured separately: in a pipelined engine prefill waits for the decode step before
        it, and the next decode step finds its tokens ready.
        """
        if tokens := sum(call.tokens for call in calls):
            expected_s, prefill_s = self.seconds(calls), max(0.0, seconds - self.decode_s * decoded)
            for call in calls:
                known_s, share = self.token_s(call.context), min(1.0, call.tokens / CHUNK_TOKENS_FIRST)
                token_s = known_s * prefill_s / expected_s if expected_s else prefill_s / tokens
                self._token_times[_power(call.context)] = _average(known_s, token_s, share)
        elif decoded:
            rows = self.rows.bit_length()
            self._decode_times[rows] = _average(self._decode_times.get(rows, 0.0), seconds)


@dataclass(slots=True)
class PrefillBudget:
    """Prefill budget of one step, and what is spent of it."""

    pace: PrefillCostModel
    room_s: float
    tokens_max: int
    spent: list[PrefillCall] = field(default_factory=list)

    def holds(self, call: PrefillCall) -> bool:
        """Return whether the budget has room for `call` too."""
        calls = [*self.spent, call]
        fits = sum(each.tokens for each in calls) <= self.tokens_max
        return fits and self.pace.seconds(calls) <= self.room_s

    def chunk_length(self, left: int, context: int) -> int:
        """Return how many of a row's `left` tokens to run after `context`; 0 if they do not fit.

        Only the first call of a step is cut. There are few lengths, because kernels are tuned by shape.
        """
        if self.holds(PrefillCall(left, context)):
            return left
        if self.spent:
            return 0
        token_s = self.pace.token_s(context)
        fitting = int(min(self.tokens_max, self.room_s / token_s if token_s else left))
        unit = 1 << max(0, fitting.bit_length() - 3)
        return min(left, self.tokens_max, max(CHUNK_TOKENS_MIN, fitting // unit * unit))


def _power(context: int) -> int:
    return (context // CONTEXT_TOKENS_MIN).bit_length()


def _average(known: float, measured: float, share: float = 1.0) -> float:
    """Return a moving average with a measurement in it; the measurement if there was none."""
    error = min(measured - known, _ERROR_MAX * known)
    return known + share * _RATE * error if known else measured
