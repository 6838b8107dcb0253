"""What rows of a model can do, together and one by one: found by doing it, next to what each does alone.

Having the right caches is not enough. Some models take a position from the width of a buffer or from one
number for all rows, some cut blocks where a row happens to lie, and then give rows of unequal length wrong
answers without a word. Many do so only beyond a length that their config names: what is tried has all of
those close by, and prompts on both sides of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract import Piece
from worker.engine.caches import stored
from worker.engine.caches.ahead import AheadBatch
from worker.engine.caches.batch import Batch, RowCaches
from worker.engine.caches.gaps import gapped, hiding
from worker.engine.caches.prefill import prefill_abreast, prefill_together
from worker.engine.caches.spans import NO_GAPS, Gaps

Prompt = tuple[int, ...]

NEAR_TOKENS = 4
"""Where thresholds are, if they can be brought that near."""
THRESHOLD_TOKENS_MAX = 128
"""How far a threshold may be to be tried: prompts twice as long are run."""
_FOLLOWING = (2, 7)
"""Fed to each row after its prompt."""
_AHEAD: tuple[tuple[tuple[Prompt, ...], tuple[int, ...]], ...] = (
    (((2, 7, 9), (2,), (7, 2)), (1, 1, 2)),
    (((3,), (5, 3, 6, 2), (8, 1)), (1, 2, 2)),
    (((4, 4), (9,), (3, 5)), (2, 1, 1)),
)
"""What three rows are fed behind each other, and how much of it they keep."""
_REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What upstream's models and caches raise when they are asked for too much."""

_REASON_MAX = 160
"""Characters; what an error says beyond them is for programmers."""
_DIFFERENCE_MAX = 0.1
"""Of the logits' spread. Rounding makes a hundredth of it at most, a wrong position as much as it likes."""
_MEAN_DIFFERENCE_MAX = 0.03
"""Of all positions of a prompt, their mean: rounding may choose another expert in one of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is tried: a network, and the tokens at which the farthest of its thresholds lies."""

    network: nn.Module
    threshold: int = NEAR_TOKENS


@dataclass(frozen=True, slots=True)
class Abilities:
    """`together`: rows of unequal lengths answer in one batch as they do alone. `padded`: their prompts can
    be run together, too. `restorable`: a row that is made again of what was stored goes on as it did. `cut`:
    a prompt can be run in pieces of any length. `ahead`: rows can be fed unequal numbers of tokens in one
    step, and take some of them back. `sparse`: a prompt can be run with parts of it left out, each of the
    others where it stands. `abreast`: pieces of prompts that stand at one position can be run together.
    `reasons`: for what is not so, but for `sparse` and `abreast`: only those miss the one who ask for it, the
    other makes nothing but time."""

    together: bool
    padded: bool
    restorable: bool
    cut: bool
    ahead: bool
    sparse: bool
    abreast: bool
    reasons: tuple[str, ...] = ()


def find_abilities(stage: Stage, agree: Callable[[bool], bool] = bool, *, alike: bool = True) -> Abilities:
    """Raises what upstream's model raises where not even a single row runs.

    Of a network that several processes run together, each of them has to try the same: `agree` says of each
    verdict whether all have it, and `alike` whether their caches are of the same kinds.
    """
    is_far = stage.threshold > THRESHOLD_TOKENS_MAX
    trial = _Trial(stage.network, NEAR_TOKENS if is_far else stage.threshold)
    reasons: list[str] = []

    def can(ability: str, attempt: Callable[[], None]) -> bool:
        why = ""
        try:
            attempt()
        except _REFUSALS as error:
            why = _first_sentence(error)
        if not agree(not why):
            reasons.append(f"{ability}: {why or 'another process cannot'}")
            return False
        return True

    if is_far:
        reasons.append(f"no batches: it changes at {stage.threshold} tokens, too far to be tried")
    if not alike:
        reasons.append("no batches, nothing reused: its parts keep different kinds of caches")
    together = alike and not is_far and can("no batches", trial.decode_together)
    padded = together and can("prompts run apart", trial.prefill_together)
    restorable = alike and can("nothing reused", trial.restore)
    cut = can("answers depend on where a prompt is cut", trial.cut)
    ahead = padded and can("no drafts", trial.run_ahead)
    found = tuple(reasons)
    leave_out = partial(trial.leave_out, together=together)
    sparse = restorable and cut and can("no part of a prompt left out", leave_out)
    abreast = padded and can("pieces of prompts run apart", trial.prefill_abreast)
    return Abilities(together, padded, restorable, cut, ahead, sparse, abreast, found)


class _Trial:
    """Its prompts, their rows' caches, and what each row answers alone: logits [1, vocabulary] after each of
    `_FOLLOWING`."""

    def __init__(self, model: nn.Module, threshold: int) -> None:
        self._model = model
        self._prompts = [
            _prompt(tokens) for tokens in (0, 1, threshold - 1, threshold + 2, 2 * threshold + 3)
        ]
        """The empty one is of a row that is fed its only token by a decode step."""
        self._rows: list[RowCaches] = [make_prompt_cache(model) for _ in self._prompts]
        self._read = [self._run(row, prompt) for row, prompt in zip(self._rows, self._prompts, strict=True)]
        self._alone = [self._follow(copy.deepcopy(row)) for row in self._rows]
        self._long, self._stop, self._piece = self._prompts[-1], threshold + 2, threshold // 2 + 1

    def decode_together(self) -> None:
        self._decode(self._rows, [len(prompt) for prompt in self._prompts], self._alone)

    def prefill_together(self) -> None:
        prompts = self._prompts[1::2] + self._prompts[-1:]
        padded = prefill_together(self._model, {str(len(prompt)): prompt for prompt in prompts})
        lengths = [len(prompt) for prompt in prompts]
        self._decode(list(padded.values()), lengths, self._alone[1::2] + self._alone[-1:])

    def prefill_abreast(self) -> None:
        """The two long rows in pieces of the same lengths, as far as both go."""
        prompts = {"shorter": self._prompts[-2], "longer": self._long}
        rows: dict[str, RowCaches] = {name: make_prompt_cache(self._model) for name in prompts}
        for first, last in ((0, self._piece), (self._piece, self._stop)):
            chunks = {name: prompt[first:last] for name, prompt in prompts.items()}
            rows = prefill_abreast(self._model, chunks, rows)
        self._run(rows["longer"], self._long[self._stop :])
        self._decode(list(rows.values()), [len(prompt) for prompt in prompts.values()], self._alone[-2:])

    def restore(self) -> None:
        """The long row again, of what is stored of one that went beyond the threshold."""
        begun, again = make_prompt_cache(self._model), make_prompt_cache(self._model)
        self._run(begun, self._long[: self._stop])
        columns, _ = stored.columns_of(begun, 0, 0, self._stop)
        used = self._stop if stored.shape_of(begun).has_states else self._stop - 2
        stored.rebuild(again, [Piece(columns, 0, self._stop, used)], stored.states_of(begun, 0))
        self._run(again, self._long[used:])
        self._equal(self._follow(again), self._alone[-1])

    def cut(self) -> None:
        """The long row's prompt whole and in pieces, looked at in every position: where there is a difference
        at a border, little of it may be left at the end."""
        row: RowCaches = make_prompt_cache(self._model)
        pieces = [self._long[first : first + self._piece] for first in range(0, len(self._long), self._piece)]
        found = mx.concatenate([self._run(row, piece) for piece in pieces])
        _limit(mx.mean(_differences(found, self._read[-1])), _MEAN_DIFFERENCE_MAX)

    def leave_out(self, *, together: bool) -> None:
        """The long row without what it has before the threshold's last token, next to one that has it where
        nothing can see it: states are those before it. `together`: beside another row, too."""
        sparse, whole, again = (make_prompt_cache(self._model) for _ in range(3))
        first, last = self._piece, self._stop - 1
        gaps = Gaps(((first, last),))
        self._run(sparse, self._long[:first])
        found = self._run(gapped(sparse, gaps), self._long[last:])
        self._run(whole, self._long[:first])
        states = stored.states_of(whole, 0)
        self._run(whole, self._long[first:last])
        columns, _ = stored.columns_of(whole, 0, 0, last)
        stored.rebuild(again, [Piece(columns, 0, last, last)], states)
        hidden = hiding(again, (first, last))
        self._equal([found], [self._run(hidden, self._long[last:])])
        right = self._follow(hidden)
        self._equal(self._follow(gapped(copy.deepcopy(sparse), gaps)), right)
        if together:
            lengths = [len(self._long) - gaps.total, len(self._long)]
            alone = [right, self._alone[-1]]
            self._decode([sparse, self._rows[-1]], lengths, alone, [gaps, NO_GAPS])

    def run_ahead(self) -> None:
        """Rows on both sides of the threshold, fed more than they keep."""
        alone, lengths = copy.deepcopy(self._rows[2:]), [len(prompt) for prompt in self._prompts[2:]]
        batch = AheadBatch(make_prompt_cache(self._model))
        batch.reseat(range(len(alone)), copy.deepcopy(alone), lengths)
        late: list[Prompt] = [()] * len(alone)
        for guesses, counts in _AHEAD:
            feeds = [(*known, *guess) for known, guess in zip(late, guesses, strict=True)]
            kept = [len(known) + count for known, count in zip(late, counts, strict=True)]
            logits = self._fed(batch, feeds)
            for row, (known, count) in enumerate(zip(late, kept, strict=True)):
                news = feeds[row][len(known) : count]
                right = [self._run(alone[row], (token,)) for token in news]
                self._equal([logits[row, len(known) : count]], [mx.concatenate(right)])
            taken = batch.settle(kept)
            late = [feed[begin:end] for feed, begin, end in zip(feeds, taken, kept, strict=True)]

    def _fed(self, batch: AheadBatch, feeds: Sequence[Prompt]) -> mx.array:
        """The logits of a step, [rows, width, vocabulary]."""
        width = max(map(len, feeds))
        batch.begin([len(feed) for feed in feeds])
        padded = [[*feed, *[0] * (width - len(feed))] for feed in feeds]
        logits: mx.array = self._model(mx.array(padded, mx.uint32), cache=batch.caches)
        batch.finish()
        return logits

    def _run(self, row: RowCaches, tokens: Prompt) -> mx.array:
        """The logits after each token, [tokens, vocabulary]."""
        return self._model(mx.array([tokens], mx.uint32), cache=row)[0] if tokens else mx.array([])

    def _follow(self, row: RowCaches) -> list[mx.array]:
        return [self._run(row, (token,)) for token in _FOLLOWING]

    def _decode(
        self,
        rows: list[RowCaches],
        lengths: list[int],
        alone: Sequence[Sequence[mx.array]],
        gaps: Sequence[Gaps] = (),
    ) -> None:
        batch = Batch(make_prompt_cache(self._model))
        batch.reseat([], rows, lengths, gaps)
        for token, right in zip(_FOLLOWING, zip(*alone, strict=True), strict=True):
            together = self._model(mx.array([[token]] * len(rows), mx.uint32), cache=batch.caches)[:, -1]
            batch.advance()
            self._equal([together], [mx.concatenate(list(right))])

    @staticmethod
    def _equal(found: Sequence[mx.array], right: Sequence[mx.array]) -> None:
        for some, others in zip(found, right, strict=True):
            _limit(mx.max(_differences(some, others)), _DIFFERENCE_MAX)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < _REASON_MAX else text.partition(". ")[0][:_REASON_MAX]


def _prompt(tokens: int) -> Prompt:
    return tuple((31 * place + 7 * tokens) % 97 + 1 for place in range(tokens))


def _limit(difference: mx.array, most: float) -> None:
    """Raises `ValueError` where logits differ by more than rounding, or are not numbers."""
    if not float(difference) <= most:
        raise ValueError(f"logits change by {float(difference):.2g} of their spread")


def _differences(logits: mx.array, right: mx.array) -> mx.array:
    """Each row's largest, of [rows, vocabulary], over the spread of its right ones. Tokens that are ruled out
    in both do not count."""
    is_there = mx.abs(right) < math.inf
    highest = mx.max(mx.where(is_there, right, -math.inf), axis=-1)
    lowest = mx.min(mx.where(is_there, right, math.inf), axis=-1)
    apart = mx.max(mx.where(logits == right, 0, mx.abs(logits - right)), axis=-1)
    return apart / (highest - lowest)
