"""Speculative decoding: drafts are verified in one forward pass and kept as far as they match the samples.

A row is fed its *backlog*, the accepted tokens that its caches lack, and a draft of what follows. The tokens
behind these are sampled one position after the other, each as it would be without drafts, once the token
before it is known. A draft token equal to the sample makes the next position known as well. So the output is
identical with and without drafts, whatever a sample depends on.

The host reads each sample before the next; nothing runs meanwhile. That costs a row only the pause, and saves
it forward passes. Where no row's sample depends on the tokens before it (greedy ones, for instance), all
columns are sampled at once and read once; what follows a rejected draft token is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.common_prefix import common_prefix_length
from worker.contract.drafts import QUIET_STEPS
from worker.contract.engine import SampledToken, StepOutput
from worker.engine.adapters import AdapterBatch
from worker.engine.caches import grouping
from worker.engine.caches.batch import RowCaches
from worker.engine.caches.ragged import FED_MAX
from worker.engine.caches.rollback_batch import RollbackBatch
from worker.engine.group import BatchRow, RowBatch, shifts_of
from worker.engine.hidden_states import HiddenStateSink
from worker.engine.sampling.grammar_masks import MaskThreads
from worker.engine.sampling.sampler import Agree, Sampler

DRAWN_VALUES_MAX = 4 * 2**20
"""Logits in a verify pass up to which tokens that are not greedy are sampled all at once: beyond, sampling
columns that are mostly ignored costs too much."""


@dataclass(slots=True)
class AcceptedTokens:
    """The accepted tokens of a row in a step. `failure`: why it produces no more."""

    drawn: list[SampledToken] = field(default_factory=list)
    failure: Exception | None = None


class VerifyBatch(RowBatch):
    """Rows that decode with drafts in one forward pass."""

    def __init__(
        self,
        model: nn.Module,
        fresh: Callable[[], RowCaches],
        hidden_states: HiddenStateSink,
        agree: Agree | None = None,
        adapters: AdapterBatch | None = None,
        width_max: int = FED_MAX,
    ) -> None:
        """`fresh`: makes empty caches of a single row. `hidden_states`: receives the hidden states of the
        tokens that stay in the caches. `agree`: see `Sampler`. `adapters`: the model's. `width_max`: maximum
        tokens of a row in a pass."""
        self._applied = (adapters or AdapterBatch()).applied
        self._agree = agree
        self._width_max = width_max
        self.members: list[BatchRow] = []
        self.quiet = 0
        """Steps since any row had a draft."""
        self._model = model
        self._fresh = fresh
        self._hidden_states = hidden_states
        self._batch = RollbackBatch(fresh())
        self._backlogs: list[list[int]] = []
        self._sampler: Sampler | None = None
        self._wide: dict[int, Sampler] = {}
        """Samplers of all columns of all rows, by width."""

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return self._batch.nbytes

    # --- a step ---

    def run(self, drafts: Mapping[str, Sequence[int]], helpers: MaskThreads) -> dict[str, AcceptedTokens]:
        """Feed every row its backlog and as much of its draft as fits. Return the accepted tokens of each
        row: at least one, unless it fails."""
        guesses = [self._guess(row, drafts.get(member.name, ())) for row, member in enumerate(self.members)]
        self.quiet = 0 if any(guesses) else self.quiet + 1
        logits = self._fed(guesses)
        said = self._drawn(logits, guesses, helpers)
        self._settle(said)
        return {member.name: each for member, each in zip(self.members, said, strict=True)}

    def _guess(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        return drafts[: max(0, self._width_max - len(self._backlogs[row]))]

    def _fed(self, guesses: Sequence[Sequence[int]]) -> mx.array:
        """Run the forward pass; return its logits, [rows, width, vocabulary]."""
        feeds = [[*backlog, *guess] for backlog, guess in zip(self._backlogs, guesses, strict=True)]
        counts = [len(feed) for feed in feeds]
        width = max(counts)
        tokens = mx.array([[*feed, *[0] * (width - len(feed))] for feed in feeds], mx.uint32)
        self._batch.begin(counts)
        with self._applied(self.adapters):
            logits: mx.array = self._model(tokens, cache=self._batch.caches, **shifts_of(self.members))
        mx.async_eval(logits, self._batch.finish())
        return logits

    def _drawn(
        self, logits: mx.array, guesses: Sequence[Sequence[int]], helpers: MaskThreads
    ) -> list[AcceptedTokens]:
        if self._is_drawn_at_once(logits):
            return self._drawn_at_once(logits, guesses)
        said = [AcceptedTokens() for _ in self.members]
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

    def _drawn_at_once(self, logits: mx.array, guesses: Sequence[Sequence[int]]) -> list[AcceptedTokens]:
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
            right = common_prefix_length(guess, tokens, first)
            places = range(first, first + right + 1)
            said.append(
                AcceptedTokens([SampledToken(tokens[place], likelihoods.get(place)) for place in places])
            )
            for place in places:
                member.row.accept_token(tokens[place])
        return said

    def _draw(
        self,
        logits: mx.array,
        places: list[int],
        going: Sequence[bool],
        said: list[AcceptedTokens],
        helpers: MaskThreads,
    ) -> None:
        """Sample the next token of each row that is `going`, from the logits at its place."""
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
            self.members[row].row.accept_token(token)
            said[row].drawn.append(SampledToken(token, likelihoods.get(row)))

    def _settle(self, said: Sequence[AcceptedTokens]) -> None:
        """Keep the accepted tokens in the caches, or put them into the backlog."""
        new_tokens = [[drawn.token for drawn in each.drawn] for each in said]
        kept = [
            len(backlog) + max(0, len(new) - 1)
            for backlog, new in zip(self._backlogs, new_tokens, strict=True)
        ]
        self._hidden_states.on_hidden_states(
            [member.name for member in self.members], kept, self._batch.lengths
        )
        taken = self._batch.commit(kept)
        self._backlogs = [
            [*backlog, *new][count:]
            for backlog, new, count in zip(self._backlogs, new_tokens, taken, strict=True)
        ]
        for member, new in zip(self.members, new_tokens, strict=True):
            member.length += len(new)

    # --- joining and leaving ---

    def rearrange(self, joining: Sequence[BatchRow], fresh: Callable[[], RowCaches]) -> None:
        """Remove dropped rows and add the `joining` ones."""
        if not joining and not self.has_holes:
            return
        everybody = [*self.members, *joining]
        order = [row for row, member in enumerate(everybody) if not member.dropped]
        backlogs = [*self._backlogs, *([_token(member)] for member in joining)]
        self._batch.rearrange(order, [m.caches for m in joining], [m.length - 1 for m in joining])
        self.members = [everybody[row] for row in order]
        self._backlogs = [backlogs[row] for row in order]
        for member in joining:
            member.token, member.caches = None, []
        self._wide.clear()
        if self._sampler is not None:
            self._sampler.release()
        self._sampler = Sampler([member.row for member in self.members], self._agree)

    def source(self, member: BatchRow) -> tuple[RowCaches, int]:
        """Return lazy copies of a row's caches, up to its last accepted token, and its place in them."""
        place = self.members.index(member)
        return self._copied(place, self._backlogs[place]), 0

    def _give(self, place: int) -> None:
        *late, last = self._backlogs[place]
        member = self.members[place]
        member.token, member.caches = mx.array([last], mx.uint32), self._copied(place, late)

    def detach(self, fresh: Callable[[], RowCaches]) -> list[BatchRow]:
        """Return the rows that are left, each with its token and caches, to join another group."""
        for place, member in enumerate(self.members):
            if not member.dropped:
                self._give(place)
        if self._sampler is not None:
            self._sampler.release()
        return self.living

    def _copied(self, place: int, late: Sequence[int]) -> RowCaches:
        """Return copies of a row's caches, advanced by the tokens in `late`."""
        own = self._batch.extract(place, self._fresh())
        if late:
            tokens, member = mx.array([list(late)], mx.uint32), self.members[place]
            with self._applied([member.adapter]):
                self._model(tokens, cache=own, **shifts_of([member]))
        return own


def _token(member: BatchRow) -> int:
    assert member.token is not None, "only rows in no group have a token"
    token: Any = member.token.item()
    return int(token)


class SpecDecoder:
    """The rows that decode with drafts, in groups of similar length."""

    def __init__(
        self,
        model: nn.Module,
        fresh: Callable[[], RowCaches],
        hidden_states: HiddenStateSink,
        agree: Agree | None = None,
        slack: int = 0,
        adapters: AdapterBatch | None = None,
    ) -> None:
        """`slack`: as in `grouping`. The other parameters are those of `VerifyBatch`."""
        self._agree = agree
        self._slack = slack
        self.groups: list[VerifyBatch] = []
        self._model = model
        self._fresh = fresh
        self._hidden_states = hidden_states
        self._adapters = adapters
        self._rows_max: int | None = None
        self._width_max = FED_MAX

    def limit_passes(self, width_max: int) -> None:
        """Verify each row by itself, at most `width_max` tokens at a time."""
        self._rows_max, self._width_max = 1, width_max

    def board(self, members: list[BatchRow]) -> None:
        """Start speculative decoding of rows whose samples have all been read."""
        rows_max = self._rows_max or max(1, len(members))
        for first in range(0, len(members), rows_max):
            self._board(members[first : first + rows_max])

    def _board(self, members: list[BatchRow]) -> None:
        lengths = [member.length for member in members]
        for group in self.groups:
            together = [*lengths, *(m.length for m in group.living)]
            has_room = self._rows_max is None or len(together) <= self._rows_max
            if has_room and grouping.fits([together], self._slack):
                break
        else:
            group = VerifyBatch(
                self._model, self._fresh, self._hidden_states, self._agree, self._adapters, self._width_max
            )
            self.groups.append(group)
        group.rearrange(members, self._fresh)

    def rearrange(self, joining: list[BatchRow]) -> list[BatchRow]:
        """Remove dropped rows; add `joining` rows to groups, if there are any. Return the rows that are to
        decode plainly."""
        quiet = [group for group in self.groups if group.quiet >= QUIET_STEPS]
        plain = [row for group in quiet for row in group.detach(self._fresh)]
        self.groups = [group for group in self.groups if group not in quiet]
        for group in self.groups:
            group.rearrange([], self._fresh)
        self.groups = [group for group in self.groups if group.members]
        if not self.groups:
            return [*joining, *plain]
        self.board(joining)
        return plain

    def let_go(self) -> None:
        """Drop groups without rows."""
        self.groups = [group for group in self.groups if not group.is_abandoned]

    def run(self, step: StepOutput, drafts: Mapping[str, Sequence[int]], helpers: MaskThreads) -> StepOutput:
        """Run a step of all groups. Return it merged with `step`, which holds the samples of the other rows
        and of those that have just joined."""
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
        return StepOutput(tokens, likelihoods, failed, further)


def _behind(token: int | None, drafted: Sequence[int]) -> Sequence[int]:
    """Return the rest of a draft once `token`, the sample at its first position, has been read; empty if
    rejected."""
    if token is None:
        return drafted
    return drafted[1:] if drafted and drafted[0] == token else ()
