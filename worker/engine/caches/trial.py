"""Whether rows of a model can share a forward pass, and be stored: found by doing it, next to each row alone.

Having the right caches is not enough. Some models take a position from the width of a buffer or from one
number for all rows, and then give rows of unequal length wrong answers without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract import Piece, Shape
from worker.engine.caches import stored
from worker.engine.caches.ahead import AheadBatch
from worker.engine.caches.batch import Batch, RowCaches
from worker.engine.caches.prefill import prefill_together

log = logging.getLogger(__name__)

Prompt = tuple[int, ...]

_PROMPTS: tuple[Prompt, ...] = ((), (3,), (1, 4), (1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7))
"""The empty one is of a row that is fed its only token by a decode step."""
_LONG = _PROMPTS[-1]
_STOP = 6
"""Where that one is stored."""
_FOLLOWING = (2, 7)
"""Fed to each row after its prompt."""
_AHEAD: tuple[tuple[tuple[Prompt, ...], tuple[int, ...]], ...] = (
    (((2, 7, 9), (2,), (7, 2)), (1, 1, 2)),
    (((3,), (5, 3, 6, 2), (8, 1)), (1, 2, 2)),
    (((4, 4), (9,), (3, 5)), (2, 1, 1)),
)
"""What rows are fed behind each other, and how much of it they keep."""
_REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What upstream's models and caches raise when they are asked for too much."""

_DIFFERENCE_MAX = 0.1
"""Of the logits' spread. Rounding makes a hundredth of it at most, a wrong position as much as it likes."""


def can_decode_together(model: nn.Module) -> bool:
    """Whether rows of unequal lengths answer in one batch as they do alone."""
    return _agree(model, _PROMPTS, lambda: [_alone(model, prompt) for prompt in _PROMPTS], "decode together")


def can_prefill_together(model: nn.Module) -> bool:
    """Whether prompts of unequal lengths can be padded; of models that can decode together."""
    some = _PROMPTS[1:]

    def padded() -> list[RowCaches]:
        return list(prefill_together(model, {str(prompt): prompt for prompt in some}).values())

    return _agree(model, some, padded, "be prefilled together")


def can_run_ahead(model: nn.Module) -> bool:
    """Whether rows can be fed unequal numbers of tokens in one step and take some of them back; of models
    whose prompts can be padded."""
    try:
        difference = max(_differences_ahead(model))
    except _REFUSALS as error:
        log.debug("rows cannot run ahead: %r", error)
        return False
    if not difference <= _DIFFERENCE_MAX:
        log.debug("rows cannot run ahead: their logits differ by %.2g", difference)
        return False
    return True


def _differences_ahead(model: nn.Module) -> Iterator[float]:
    prompts = _PROMPTS[1:]
    alone = [_alone(model, prompt) for prompt in prompts]
    batch = AheadBatch(make_prompt_cache(model))
    batch.reseat(range(len(prompts)), [_alone(model, p) for p in prompts], [len(p) for p in prompts])
    late: list[Prompt] = [()] * len(prompts)
    for guesses, counts in _AHEAD:
        feeds = [(*known, *guess) for known, guess in zip(late, guesses, strict=True)]
        width = max(map(len, feeds))
        batch.begin([len(feed) for feed in feeds])
        padded = [[*feed, *[0] * (width - len(feed))] for feed in feeds]
        logits = model(mx.array(padded, mx.uint32), cache=batch.caches)
        batch.finish()
        for row, (known, guess, count) in enumerate(zip(late, guesses, counts, strict=True)):
            for index, token in enumerate(guess[:count], start=len(known)):
                right = model(mx.array([[token]], mx.uint32), cache=alone[row])
                yield _difference(logits[row : row + 1, index : index + 1], right)
        kept = [len(known) + count for known, count in zip(late, counts, strict=True)]
        taken = batch.settle(kept)
        late = [feed[begin:end] for feed, begin, end in zip(feeds, taken, kept, strict=True)]


def restorable_shape(model: nn.Module) -> Shape | None:
    """What must be stored of a row to make it again; None where a row made again answers otherwise."""
    try:
        whole = _alone(model, _LONG)
        shape = stored.shape_of(whole)
        begun = _alone(model, _LONG[:_STOP])
        columns, _ = stored.columns_of(begun, 0, 0, _STOP)
        states = stored.states_of(begun, 0)
        again: RowCaches = make_prompt_cache(model)
        used = _STOP if shape.has_states else _STOP - 2
        stored.rebuild(again, [Piece(columns, 0, _STOP, used)], states)
        model(mx.array([_LONG[used:]], mx.uint32), cache=again)
        for token in _FOLLOWING:
            first, second = (model(mx.array([[token]], mx.uint32), cache=row) for row in (whole, again))
            difference = _difference(second, first)
            if not difference <= _DIFFERENCE_MAX:
                log.debug("rows cannot be restored: their logits differ by %.2g", difference)
                return None
    except _REFUSALS as error:
        log.debug("rows cannot be restored: %r", error)
        return None
    return shape


def _alone(model: nn.Module, prompt: Prompt) -> RowCaches:
    caches: RowCaches = make_prompt_cache(model)
    if prompt:
        model(mx.array([prompt], mx.uint32), cache=caches)
    return caches


def _difference(logits: mx.array, right: mx.array) -> float:
    """The largest, over the spread of the right ones. May be NaN."""
    return float(mx.max(mx.abs(logits - right)) / (mx.max(right) - mx.min(right)))


def _agree(
    model: nn.Module, prompts: Sequence[Prompt], prefill: Callable[[], list[RowCaches]], ability: str
) -> bool:
    """Whether rows as `prefill` makes them decode together as each of them would alone."""
    try:
        batch = Batch(make_prompt_cache(model))
        batch.reseat([], prefill(), [len(prompt) for prompt in prompts])
        alone = [_alone(model, prompt) for prompt in prompts]
        for token in _FOLLOWING:
            together = model(mx.array([[token]] * len(alone), mx.uint32), cache=batch.caches)
            batch.advance()
            apart = mx.concatenate([model(mx.array([[token]], mx.uint32), cache=row) for row in alone])
            difference = _difference(together, apart)
            if not difference <= _DIFFERENCE_MAX:
                log.debug("rows cannot %s: their logits differ by %.2g", ability, difference)
                return False
    except _REFUSALS as error:
        log.debug("rows cannot %s: %r", ability, error)
        return False
    return True
