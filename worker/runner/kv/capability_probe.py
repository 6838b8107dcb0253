"""Capability probe: runs a model's rows together and compares the logits with those of each row alone.

The right caches are not enough. Some models take positions from a buffer's width, or from one number for all
rows; some place blocks by a row's offset. Rows of unequal lengths then silently get wrong outputs. Many fail
only beyond a length that their config names. So the probe's networks have all such thresholds shortened, and
its prompts lie on both sides of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from worker.runner.kv import snapshots
from worker.runner.kv.batch import CacheBatch, RowCaches, prefill_abreast
from worker.runner.kv.buckets import FED_MAX
from worker.runner.kv.positions import route_attention
from worker.runner.kv.row_caches import fresh_caches
from worker.runner.kv.sparse_rows import hiding, skipping
from worker.values import CacheSegment, KVQuantization

Prompt = tuple[int, ...]

THRESHOLD_TOKENS_MIN = 4
"""Length to which thresholds are shortened, if possible."""
THRESHOLD_TOKENS_MAX = 128
"""Highest threshold that is probed; prompts twice as long are run."""
_FOLLOWING = (2, 7)
"""Tokens fed to each row after its prompt."""
_AHEAD: tuple[tuple[tuple[Prompt, ...], tuple[int, ...]], ...] = (
    (((2, 7, 9), (2,), (7, 2)), (1, 1, 2)),
    (((3,), (5, 3, 6, 2), (8, 1)), (1, 2, 2)),
    (((4, 4), (9,), (3, 5)), (2, 1, 1)),
)
"""What three rows are fed in each step, and how many of these tokens each keeps."""
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What upstream's models and caches raise for unsupported calls."""

_REASON_MAX = 160
"""Maximum length in characters; the rest of an error is for programmers."""
_DIFFERENCE_MAX = 0.1
"""Maximum difference, relative to the logits' spread. Rounding gives 0.01 at most, a wrong position any
amount."""
_ABREAST_DIFFERENCE_MAX = 0.02
"""The same for chunks of unequal length in one call, which are only an optimization. Padding that reaches the
shorter row's state may fade with each step: mlx-vlm's plamo2 has 0.035, with which its answers are wrong."""
_MEAN_DIFFERENCE_MAX = 0.03
"""Maximum mean over a prompt's positions: in one of them rounding may select another expert."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The network to probe, and the position in tokens of its highest threshold. `kv_quantization`: rows are
    also probed with KV caches that are quantized so, from their first token on."""

    network: nn.Module
    threshold: int = THRESHOLD_TOKENS_MIN
    kv_quantization: KVQuantization | None = None


@dataclass(frozen=True, slots=True)
class BatchCapabilities:
    """What a model's rows support. `together`: rows of unequal lengths give in one batch the same results as
    alone. `padded`: their prompts can be batched too. `restorable`: a row restored from stored caches
    continues unchanged. `cut`: a prompt can be run in chunks of any length. `ahead`: rows can be fed
    different numbers of tokens in one step, and take some back. `sparse`: parts of a prompt can be skipped,
    with the others at their positions. `abreast`: chunks of prompts at one position can be batched.
    `reasons`: why a capability is missing. Not reported for `sparse`, which matters only to requests that ask
    for it, nor for `abreast` and `bucketed`, which are only optimizations."""

    together: bool
    padded: bool
    restorable: bool
    cut: bool
    ahead: bool
    sparse: bool
    abreast: bool
    bucketed: bool
    reasons: tuple[str, ...] = ()


def probe_capabilities(
    stage: ProbeTarget, agree: Callable[[bool], bool] = bool, *, alike: bool = True
) -> BatchCapabilities:
    """Probe a model's capabilities. Raises what upstream's model raises if not even a single row runs.

    If several processes run the network together, all must probe the same. `agree`: returns whether a result
    holds in all of them. `alike`: whether their caches are of the same kinds.
    """
    is_far = stage.threshold > THRESHOLD_TOKENS_MAX
    threshold = THRESHOLD_TOKENS_MIN if is_far else stage.threshold
    trial = _Trial(stage.network, threshold)
    reasons: list[str] = []

    def can(ability: str, attempt: Callable[[], None]) -> bool:
        why = ""
        try:
            attempt()
        except REFUSALS as error:
            why = first_sentence(error)
        if not agree(not why):
            reasons.append(f"{ability}: {why or 'another rank cannot'}")
            return False
        return True

    if is_far:
        reasons.append(f"cannot be batched: it changes at {stage.threshold} tokens, too far to be probed")
    if not alike:
        reasons.append("cannot be batched, no prefix reuse: its shards have different kinds of caches")
    together = alike and not is_far and can("cannot be batched", trial.decode_together)
    padded = together and can("prompts cannot be batched", trial.prefill_together)
    restorable = alike and can("no prefix reuse", trial.restore)
    cut = can("answers depend on where a prompt is cut", trial.cut)
    ahead = padded and can("no speculative decoding", trial.run_ahead)
    served = trial
    if stage.kv_quantization is not None:
        served = trial_of_quantized = _Trial(stage.network, threshold, stage.kv_quantization)
        together = together and can("quantized rows cannot be batched", trial_of_quantized.decode_together)
        restorable = restorable and can("quantized rows: no prefix reuse", trial_of_quantized.restore)
        ahead = ahead and can("quantized rows: no speculative decoding", trial_of_quantized.run_ahead)
    found = tuple(reasons)
    skip_tokens = partial(trial.skip_tokens, together=together)
    sparse = restorable and cut and can("no sparse prefill", skip_tokens)
    abreast = padded and can("chunks cannot be batched", trial.prefill_abreast)
    share_a_pass = partial(served.share_a_pass, ahead=ahead)
    bucketed = together and can("rows of unequal lengths are padded", share_a_pass)
    return BatchCapabilities(together, padded, restorable, cut, ahead, sparse, abreast, bucketed, found)


class _Trial:
    """The probe: its prompts, their rows' caches, and the reference logits of each row alone, [1, vocabulary]
    after each of `_FOLLOWING`."""

    def __init__(
        self, model: nn.Module, threshold: int, kv_quantization: KVQuantization | None = None
    ) -> None:
        route_attention(model)
        self._model = model
        self._is_bucketed = False
        self._fresh = partial(fresh_caches, model, kv_quantization)
        self._prompts = [
            _prompt(tokens) for tokens in (0, 1, threshold - 1, threshold + 2, 2 * threshold + 3)
        ]
        """The empty prompt is that of a row whose only token is fed by a decode step."""
        self._rows: list[RowCaches] = [self._fresh() for _ in self._prompts]
        self._read = [self._run(row, prompt) for row, prompt in zip(self._rows, self._prompts, strict=True)]
        self._alone = [self._follow(copy.deepcopy(row)) for row in self._rows]
        self._long, self._stop, self._piece = self._prompts[-1], threshold + 2, threshold // 2 + 1

    def decode_together(self) -> None:
        self._decode(self._rows, [len(prompt) for prompt in self._prompts], self._alone)

    def share_a_pass(self, *, ahead: bool) -> None:
        """Run rows of unequal lengths, each in a bucket of its own. `ahead`: also feed them several
        tokens."""
        self._is_bucketed = True
        self.decode_together()
        if ahead:
            self.run_ahead()

    def _batch(self) -> CacheBatch:
        return CacheBatch(self._fresh(), is_bucketed=self._is_bucketed, capacity=_narrow)

    def prefill_together(self) -> None:
        places = [1, 3, 4]
        chunks = {str(place): self._prompts[place] for place in places}
        rows = self._prefill(chunks, {name: self._fresh() for name in chunks})
        lengths = [len(chunk) for chunk in chunks.values()]
        self._decode(list(rows.values()), lengths, [self._alone[place] for place in places])

    def prefill_abreast(self) -> None:
        """Run the two long rows from one position on: in chunks of one length, and then to their ends."""
        rows: dict[str, RowCaches] = {"3": self._fresh(), "4": self._fresh()}
        for first, last in ((0, self._piece), (self._piece, None)):
            chunks = {name: self._prompts[int(name)][first:last] for name in rows}
            rows = self._prefill(chunks, rows, first, most=_ABREAST_DIFFERENCE_MAX)
        lengths = [len(prompt) for prompt in self._prompts[-2:]]
        self._decode(list(rows.values()), lengths, self._alone[-2:], most=_ABREAST_DIFFERENCE_MAX)

    def _prefill(
        self,
        chunks: Mapping[str, Prompt],
        before: Mapping[str, RowCaches],
        first: int = 0,
        most: float = _DIFFERENCE_MAX,
    ) -> dict[str, RowCaches]:
        """Run chunks of prompts, by their places, from position `first` on in one call. Compare the logits
        behind each: the last layer's attention shows nowhere else."""
        found: list[mx.array] = []
        rows = prefill_abreast(
            lambda tokens, cache: found.append(self._model(tokens, cache=cache)), chunks, before
        )
        for row, (name, chunk) in enumerate(chunks.items()):
            end = first + len(chunk)
            self._equal([found[0][row, len(chunk) - 1][None]], [self._read[int(name)][end - 1 : end]], most)
        return rows

    def restore(self) -> None:
        """Restore the long row from the stored caches of one that went beyond the threshold."""
        begun, again = self._fresh(), self._fresh()
        self._run(begun, self._long[: self._stop])
        columns, _ = snapshots.columns_of(begun, 0, 0, self._stop)
        used = self._stop if snapshots.shape_of(begun).has_states else self._stop - 2
        snapshots.rebuild(again, [CacheSegment(columns, 0, self._stop, used)], snapshots.states_of(begun, 0))
        self._run(again, self._long[used:])
        self._equal(self._follow(again), self._alone[-1])

    def cut(self) -> None:
        """Compare the long row's prompt, whole and in chunks, at every position: a difference at a chunk's
        border must have faded by the end."""
        row: RowCaches = self._fresh()
        pieces = [self._long[first : first + self._piece] for first in range(0, len(self._long), self._piece)]
        found = mx.concatenate([self._run(row, piece) for piece in pieces])
        _limit(mx.mean(differences(found, self._read[-1])), _MEAN_DIFFERENCE_MAX)

    def skip_tokens(self, *, together: bool) -> None:
        """Skip tokens of the long row before the threshold's last token; compare with a row in which these
        are masked. States are those before them. `together`: also in a batch with another row."""
        sparse, whole, again = (self._fresh() for _ in range(3))
        first, last = self._piece, self._stop - 1
        self._run(sparse, self._long[:first])
        sparse = skipping(sparse, first, last)
        found = self._run(sparse, self._long[last:])
        self._run(whole, self._long[:first])
        states = snapshots.states_of(whole, 0)
        self._run(whole, self._long[first:last])
        columns, _ = snapshots.columns_of(whole, 0, 0, last)
        snapshots.rebuild(again, [CacheSegment(columns, 0, last, last)], states)
        hidden = hiding(again, (first, last))
        self._equal([found], [self._run(hidden, self._long[last:])])
        right = self._follow(hidden)
        self._equal(self._follow(copy.deepcopy(sparse)), right)
        if together:
            alone = [right, self._alone[-1]]
            self._decode([sparse, self._rows[-1]], [len(self._long)] * 2, alone)

    def run_ahead(self) -> None:
        """Run rows on both sides of the threshold, feeding more tokens than they keep."""
        alone, lengths = copy.deepcopy(self._rows[2:]), [len(prompt) for prompt in self._prompts[2:]]
        batch = self._batch()
        batch.rearrange([], copy.deepcopy(alone), lengths)
        late: list[Prompt] = [()] * len(alone)
        for guesses, counts in _AHEAD:
            feeds = [(*known, *guess) for known, guess in zip(late, guesses, strict=True)]
            kept = [len(known) + count for known, count in zip(late, counts, strict=True)]
            logits = self._fed(batch, feeds)
            for row, (known, count) in enumerate(zip(late, kept, strict=True)):
                new_tokens = feeds[row][len(known) : count]
                right = [self._run(alone[row], (token,)) for token in new_tokens]
                self._equal([logits[row, len(known) : count]], [mx.concatenate(right)])
            taken = batch.commit(kept)
            late = [feed[begin:end] for feed, begin, end in zip(feeds, taken, kept, strict=True)]

    def _fed(self, batch: CacheBatch, feeds: Sequence[Prompt]) -> mx.array:
        """Return the logits of a step, [rows, width, vocabulary]."""
        width = max(map(len, feeds))
        batch.begin([len(feed) for feed in feeds])
        padded = [[*feed, *[0] * (width - len(feed))] for feed in feeds]
        logits: mx.array = self._model(mx.array(padded, mx.uint32), cache=batch.caches)
        batch.finish()
        return logits

    def _run(self, row: RowCaches, tokens: Prompt) -> mx.array:
        """Return the logits after each token, [tokens, vocabulary]."""
        return self._model(mx.array([tokens], mx.uint32), cache=row)[0] if tokens else mx.array([])

    def _follow(self, row: RowCaches) -> list[mx.array]:
        return [self._run(row, (token,)) for token in _FOLLOWING]

    def _decode(
        self,
        rows: list[RowCaches],
        lengths: list[int],
        alone: Sequence[Sequence[mx.array]],
        *,
        most: float = _DIFFERENCE_MAX,
    ) -> None:
        batch = self._batch()
        batch.rearrange([], copy.deepcopy(rows), lengths)
        for token, right in zip(_FOLLOWING, zip(*alone, strict=True), strict=True):
            batch.begin([1] * len(rows), may_revert=False)
            together = self._model(mx.array([[token]] * len(rows), mx.uint32), cache=batch.caches)[:, -1]
            batch.advance()
            self._equal([together], [mx.concatenate(list(right))], most)

    @staticmethod
    def _equal(found: Sequence[mx.array], right: Sequence[mx.array], most: float = _DIFFERENCE_MAX) -> None:
        for some, others in zip(found, right, strict=True):
            _limit(mx.max(differences(some, others)), most)


def first_sentence(error: BaseException) -> str:
    """Return what an error of upstream says, in one sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < _REASON_MAX else text.partition(". ")[0][:_REASON_MAX]


def _narrow(tokens: int) -> int:
    """Return a capacity that rows of the probe's unequal lengths do not share."""
    return tokens + tokens % 2 + FED_MAX


def _prompt(tokens: int) -> Prompt:
    return tuple((31 * place + 7 * tokens) % 97 + 1 for place in range(tokens))


def _limit(difference: mx.array, most: float) -> None:
    """Raise `ValueError` if logits differ by more than rounding, or are not numbers."""
    if not float(difference) <= most:
        raise ValueError(f"logits change by {float(difference):.2g} of their spread")


def differences(logits: mx.array, right: mx.array) -> mx.array:
    """Return each row's largest difference, of [rows, vocabulary], relative to the spread of `right`. Tokens
    that both rule out do not count."""
    is_there = mx.abs(right) < math.inf
    highest = mx.max(mx.where(is_there, right, -math.inf), axis=-1)
    lowest = mx.min(mx.where(is_there, right, math.inf), axis=-1)
    apart = mx.max(mx.where(logits == right, 0, mx.abs(logits - right)), axis=-1)
    return apart / (highest - lowest)
