"""Batch sampler: samples every row by its own settings, without waiting for the device.

A row's token depends on its logits, settings, seed, position and the tokens before it, never on other rows.
Rows that need the same operations are sampled together, and no row pays for what only another needs.

The order is that of `mlx_lm`: bias, penalties, grammar mask, then top-p, min-p and top-k on the probabilities
at temperature 1, and only then the temperature.

Rows with a grammar do have to wait: their guides must have seen the token before. So sampling has two parts.
`begin` samples all other rows. Once the tokens before have been read, the guides are called, and `finish`
samples their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import mlx.core as mx

from worker.runner.sampling.distribution import (
    Distribution,
    Filters,
    filters_of,
    most_likely,
    uniforms_at,
)
from worker.runner.sampling.grammar_masks import Job, Masks
from worker.runner.sampling.logprobs import LogprobReport
from worker.runner.sampling.penalties import Bias, Penalties, is_penalized
from worker.runner.sampling.state import SamplingState
from worker.values import Logprob, SamplingParams

Agree = Callable[[mx.array], mx.array]
"""Returns the tokens that count, given those sampled, [rows] uint32: of several processes that sample, one
decides."""

TEMPERATURE_MIN = 1e-5
"""Below this sampling is greedy: dividing by less leaves only the most likely token, or overflows."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of one step. Lazy: nothing is evaluated."""

    tokens: mx.array
    """Sampled tokens, [rows] uint32."""
    arrays: list[mx.array]
    """Everything else that must be evaluated with the step."""
    report: LogprobReport | None = None
    reported: Sequence[int] = ()
    """The batch indices of the rows in the report."""

    def likelihoods(self) -> dict[int, Logprob]:
        """Return the logprobs of the rows that request them, by batch index. Waits for the step."""
        return dict(zip(self.reported, self.report.read(), strict=True)) if self.report else {}


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A step between `begin` and `finish`. Lazy: nothing is evaluated.

    `drawn`: the tokens of each group, None if its guides must be called first. `questions`: the jobs that
    call them, one per row. Run each once, in any thread, when the guides have seen all tokens before.
    """

    logits: mx.array
    positions: Sequence[int]
    fed: mx.array | None
    drawn: Sequence[mx.array | None]
    questions: Sequence[Job]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that can be evaluated before `finish`."""
        return [self.logits, *(tokens for tokens in self.drawn if tokens is not None)]


class Sampler:
    """Samples one token for each row of a batch. Built anew whenever the rows change."""

    def __init__(self, rows: Sequence[SamplingState], agree: Agree | None = None) -> None:
        """`rows`: in the order of the logits. None may belong to another, unreleased sampler. `agree`: None
        if no other process samples."""
        members: dict[_Needs, list[int]] = {}
        for index, row in enumerate(rows):
            members.setdefault(_needs(row.sampling), []).append(index)
        self._rows = rows
        self._agree = agree
        self._groups = [_Group(needs, indices, rows) for needs, indices in members.items()]
        order = [index for group in self._groups for index in group.members]
        # The index of each row's token in the concatenated tokens of the groups.
        self._places = mx.argsort(mx.array(order, mx.uint32)) if order != list(range(len(rows))) else None
        self._forced = [index for index, row in enumerate(rows) if row.may_force]
        self._reported = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]

    @property
    def is_memoryless(self) -> bool:
        """Whether each row's token depends only on its logits and its position, on no token before it."""
        return not self._forced and not any(group.is_guided or group.penalties for group in self._groups)

    @property
    def is_greedy(self) -> bool:
        """Whether all rows are greedy."""
        return not any(group.is_drawn for group in self._groups)

    def __call__(self, logits: mx.array, positions: Sequence[int], fed: mx.array | None = None) -> Sampled:
        """Sample from `logits`, [rows, vocabulary], at least one row, at `positions` of the sequences.

        `fed`: the tokens at the positions before, which the host need not have read; [rows] uint32. A row
        whose logits are not finite gets an arbitrary token; the others are not affected.
        """
        drawing = self.begin(logits, positions, fed)
        for question in drawing.questions:
            question()
        return self.finish(drawing)

    def begin(
        self,
        logits: mx.array,
        positions: Sequence[int],
        fed: mx.array | None = None,
        going: Sequence[bool] | None = None,
    ) -> PendingSample:
        """Begin a call; do what does not depend on the guides. Only one step can be pending. `going`: the
        rows whose tokens count; those of the others are to be ignored."""
        drawn = [None if group.is_guided else group.draw(logits, positions) for group in self._groups]
        vocabulary = logits.shape[-1]
        questions = [ask for group in self._groups for ask in group.questions(positions, vocabulary, going)]
        return PendingSample(logits, positions, fed, drawn, questions)

    def finish(self, drawing: PendingSample, going: Sequence[bool] | None = None) -> Sampled:
        """Complete the step, after all its `questions` have been run."""
        logits, positions = drawing.logits, drawing.positions
        parts = [
            group.draw(logits, positions) if tokens is None else tokens
            for group, tokens in zip(self._groups, drawing.drawn, strict=True)
        ]
        tokens = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        if self._places is not None:
            tokens = tokens[self._places]
        tokens = self._with_forced(tokens, positions, drawing.fed)
        if self._agree is not None:
            tokens = self._agree(tokens)
        counts = [group.count(tokens, going) for group in self._groups if group.penalties]
        if not self._reported:
            return Sampled(tokens, counts)
        report = self._report(logits, tokens)
        return Sampled(tokens, [*counts, *report.arrays], report, self._reported)

    def release(self) -> None:
        """Give borrowed counts back to the rows. Must be called before these join another sampler."""
        for group in self._groups:
            if group.penalties:
                group.penalties.release()

    def _with_forced(self, tokens: mx.array, positions: Sequence[int], fed: mx.array | None) -> mx.array:
        found = [self._rows[index].forced(positions[index]) for index in self._forced]
        forced = {index: one for index, one in zip(self._forced, found, strict=True) if one is not None}
        if not forced:
            return tokens
        rows = range(len(self._rows))
        chosen = mx.array([forced[row].token if row in forced else 0 for row in rows], mx.uint32)
        is_forced = mx.array([row in forced for row in rows])
        if fed is not None and any(one.unless_after for one in forced.values()):
            spared = [forced[row].unless_after if row in forced else () for row in rows]
            is_forced = is_forced & ~_is_among(fed, spared)
        return mx.where(is_forced, chosen, tokens)

    def _report(self, logits: mx.array, tokens: mx.array) -> LogprobReport:
        asked = [cast(int, self._rows[index].sampling.logprobs) for index in self._reported]
        if len(asked) < len(self._rows):
            chosen = mx.array(self._reported, mx.uint32)
            logits, tokens = logits[chosen], tokens[chosen]
        return LogprobReport.of(logits, tokens, asked)


def _is_among(tokens: mx.array, others: Sequence[Sequence[int]]) -> mx.array:
    """Return whether the token of each row, [rows] uint32, is among the `others` of that row: [rows] bool."""
    width = max(map(len, others))
    padded = [[*row, *[-1] * (width - len(row))] for row in others]
    found: mx.array = mx.any(tokens[:, None].astype(mx.int64) == mx.array(padded, mx.int64), axis=-1)
    return found


class _Needs(NamedTuple):
    """The operations that a row needs. `filters` None: it is greedy."""

    is_penalized: bool
    is_biased: bool
    is_guided: bool
    filters: Filters | None


def _needs(sampling: SamplingParams) -> _Needs:
    is_greedy = sampling.temperature < TEMPERATURE_MIN or sampling.top_k == 1 or sampling.top_p <= 0
    filters = None if is_greedy else filters_of(sampling)
    return _Needs(is_penalized(sampling), bool(sampling.logit_bias), sampling.grammar is not None, filters)


class _Group:
    """Rows of a batch that need the same operations."""

    def __init__(self, needs: _Needs, members: list[int], rows: Sequence[SamplingState]) -> None:
        chosen = [rows[index] for index in members]
        draws = [row.sampling for row in chosen]
        self.members = members
        self.is_guided = needs.is_guided
        self.is_drawn = needs.filters is not None
        self.penalties: Penalties | None = None
        if needs.is_penalized:
            self.penalties = Penalties(draws, [row.counts for row in chosen if row.counts])
        self._bias = Bias(draws) if needs.is_biased else None
        self._rows = chosen
        self._masks = Masks(len(chosen)) if needs.is_guided else None
        self._seeds = [row.seed for row in chosen]
        self._chosen = _places(members) if len(members) < len(rows) else None
        self._distribution = Distribution(needs.filters, draws) if needs.filters else None

    def questions(
        self, positions: Sequence[int], vocabulary: int, going: Sequence[bool] | None = None
    ) -> list[Job]:
        """Return the jobs that fill the grammar masks of the group's rows."""
        if self._masks is None:
            return []
        self._masks.clear(vocabulary)
        return [
            partial(row.ask, positions[index], self._masks, place)
            if going is None or going[index]
            else partial(self._masks.spare, place)
            for place, (index, row) in enumerate(zip(self.members, self._rows, strict=True))
        ]

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return the tokens of the group's rows, in the order of `members`, from the logits of the whole
        batch."""
        if self._chosen is not None:
            logits = logits[self._chosen]
        if self._distribution or self._bias or self.penalties:
            logits = logits.astype(mx.float32)
        if self._bias:
            logits = self._bias(logits)
        if self.penalties:
            logits = self.penalties(logits)
        mask = self._masks.gather() if self._masks else None
        if mask is None:
            return self._drawn(logits, positions)
        return mask.keep(self._drawn(mask.apply(logits), positions))

    def _drawn(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        if not self._distribution:
            return most_likely(logits)
        keys = [(seed, positions[index]) for seed, index in zip(self._seeds, self.members, strict=True)]
        return self._distribution(logits, mx.array([uniforms_at(*key) for key in keys], mx.float32))

    def count(self, tokens: mx.array, going: Sequence[bool] | None = None) -> mx.array:
        """Count the tokens of the group's rows, from those of the whole batch; return what must be
        evaluated."""
        assert self.penalties is not None, "the group counts nothing"
        mine = tokens if self._chosen is None else tokens[self._chosen]
        return self.penalties.add(mine, going and [going[index] for index in self.members])


def _places(members: list[int]) -> mx.array | slice:
    """Return an index that selects `members`, in order; a slice, without a copy, if they are contiguous."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first + 1 == len(members) else mx.array(members, mx.uint32)
