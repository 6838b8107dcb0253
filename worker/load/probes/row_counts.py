"""Row-count trial: whether passes over several rows or tokens give the results of passes over one.

MLX picks its kernels by the number of rows: on Metal a step of one row and one of two may round differently
(mlx 3764, 3888), and where two tokens are nearly tied, the other one is chosen. This depends on the chip, the
weights' type and MLX's version, so it is measured: a few prompts of unequal lengths are answered alone, then
again in each kind of pass, and tokens and logprobs are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from protocol.types import Exactness, PassCheck
from worker.runner.kv.buckets import FED_MAX
from worker.runner.runner import BatchEngine
from worker.values import Logprob, SampledToken, SamplingParams

ROWS_MAX = 16
"""Highest number of rows that is measured, and so the most that `--exact` allows in a pass."""
LOAD_S_MAX = 1.0
"""Maximum duration of the trial of a load, up to the end of the check that is then running."""
THOROUGH_S_MAX = 300.0
"""Maximum duration of the trials of `--exact` and `doctor`."""
_SAMPLING = SamplingParams(logprobs=8)
_STEPS = 6
"""Tokens that are compared beyond those of the first pass, at most."""
_DIFFERENCE_MAX = 1e9
"""Stands for differences that are not numbers."""

Answer = Sequence[SampledToken]


@dataclass(frozen=True, slots=True)
class TrialSize:
    """`lengths`: tokens of the prompts. `tokens`: tokens that each answer has. `budget_s`: maximum duration
    in seconds."""

    lengths: tuple[int, ...]
    tokens: int
    budget_s: float


AT_LOAD = TrialSize((5, 12), 5, LOAD_S_MAX)
THOROUGH = TrialSize((5, 12, 40), FED_MAX + 4, THOROUGH_S_MAX)

LOAD_CHECKS = (
    PassCheck(kind="decode", rows=2),
    PassCheck(kind="verify", rows=1, tokens=4),
    PassCheck(kind="decode", rows=16),
    PassCheck(kind="decode", rows=8),
    PassCheck(kind="decode", rows=4),
    PassCheck(kind="verify", rows=4, tokens=4),
    PassCheck(kind="prompts", rows=2),
    PassCheck(kind="chunks", rows=1, tokens=4),
)
"""The most telling first: time may be up."""
TABLE_CHECKS = (
    *(PassCheck(kind="decode", rows=rows) for rows in (2, 4, 8, 16)),
    *(PassCheck(kind="prompts", rows=rows) for rows in (2, 8)),
    *(PassCheck(kind="chunks", rows=1, tokens=tokens) for tokens in (1, 8)),
    *(PassCheck(kind="verify", rows=rows, tokens=tokens) for rows in (1, 4) for tokens in (2, 4, 8, 16)),
)
"""The table of `doctor`."""


def measure(
    engine: BatchEngine,
    checks: Sequence[PassCheck] = LOAD_CHECKS,
    size: TrialSize = AT_LOAD,
    clock: Callable[[], float] = time.monotonic,
) -> Exactness:
    """Return the results of `checks`, of those kinds that the engine runs. Resets the engine."""
    over_at = clock() + size.budget_s
    able = [check for check in checks if _is_run(engine, check)]
    results: list[PassCheck] = []
    with _Trial(engine, size) as trial:
        for check in able:
            if clock() >= over_at:
                break
            results.append(trial.run(check))
    return Exactness(checks=results, is_complete=len(results) == len(able))


def find_limits(engine: BatchEngine, clock: Callable[[], float] = time.monotonic) -> Exactness:
    """Return the limits within which every measured pass equals passes of one row, bit by bit. What was not
    measured is outside of them. Resets the engine."""
    over_at = clock() + THOROUGH.budget_s
    with _Trial(engine, THOROUGH) as trial:
        results: list[PassCheck] = []

        def holds(check: PassCheck) -> bool:
            if not _is_run(engine, check) or clock() >= over_at:
                return False
            results.append(trial.run(check))
            return results[-1].is_exact

        rows_max = _last(partial(_of_rows, holds), range(2, ROWS_MAX + 1))
        width = _last(partial(_of_tokens, holds), range(2, FED_MAX + 1))
        for tokens in (1, 8):
            holds(PassCheck(kind="chunks", rows=1, tokens=tokens))
    return Exactness(
        checks=results,
        is_complete=clock() < over_at,
        rows_max=rows_max,
        draft_tokens_max=width if width > 1 else 0,
    )


def _of_rows(holds: Callable[[PassCheck], bool], rows: int) -> bool:
    return holds(PassCheck(kind="decode", rows=rows))


def _of_tokens(holds: Callable[[PassCheck], bool], tokens: int) -> bool:
    return holds(PassCheck(kind="verify", rows=1, tokens=tokens))


def _last(holds: Callable[[int], bool], counts: range) -> int:
    """Return the last of `counts` up to which all hold; 1 if not even the first does."""
    for count in counts:
        if not holds(count):
            return count - 1
    return counts[-1]


def _is_run(engine: BatchEngine, check: PassCheck) -> bool:
    """Return whether the engine has passes of this kind."""
    able = engine.capabilities
    match check.kind:
        case "decode":
            return able.together
        case "verify":
            return able.ahead
        case "prompts":
            return able.padded
        case "chunks":
            return True


class _Trial:
    """The prompts, prefilled as one chunk each, and their answers alone. A context manager: at its end the
    engine has no rows."""

    def __init__(self, engine: BatchEngine, size: TrialSize) -> None:
        self._engine, self._tokens = engine, size.tokens
        self._prompts = [_prompt(index, length) for index, length in enumerate(size.lengths)]
        self._alone: list[Answer] = []

    def __enter__(self) -> _Trial:
        for index, prompt in enumerate(self._prompts):
            self._engine.prefill({_base(index): prompt[:-1]})
        for index in range(len(self._prompts)):
            self._alone += self._answers([index], self._tokens)
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.reset()

    def run(self, check: PassCheck) -> PassCheck:
        """Return the check with its result."""
        rows = [row % len(self._prompts) for row in range(check.rows)]
        match check.kind:
            case "prompts":
                pairs = self._batched_prompts(rows)
            case "chunks":
                pairs = [(self._in_chunks(check.tokens), self._alone[-1])]
            case _:
                answers = self._answers(rows, _STEPS, check.tokens)
                pairs = list(zip(answers, (self._alone[row] for row in rows), strict=True))
        results = [_compared(found, right) for found, right in pairs]
        differing = [at for at, _ in results if at is not None]
        return structs.replace(
            check,
            differs_at=min(differing, default=None),
            difference=max(difference for _, difference in results),
        )

    def _answers(
        self, prompts: Sequence[int], tokens: int, width: int = 1, bases: Sequence[str] = ()
    ) -> list[Answer]:
        """Return the first `tokens` tokens of rows that decode together, with the given prompts. `width`:
        tokens of each row in the first pass, beyond the first drafted as the answers alone. `bases`: the
        prefilled rows."""
        engine = self._engine
        names = [f"row-{place}" for place in range(len(prompts))]
        bases = bases or [_base(index) for index in prompts]
        for name, base, index in zip(names, bases, prompts, strict=True):
            engine.fork(base, name)
            engine.start(name, self._prompts[index], len(self._prompts[index]), _SAMPLING)
        engine.step()  # starts the pipeline
        drafts = {
            name: [drawn.token for drawn in self._alone[index][:width]]
            for name, index in zip(names, prompts, strict=True)
            if width > 1
        }
        found: dict[str, list[SampledToken]] = {name: [] for name in names}
        while min(map(len, found.values())) < min(self._tokens, tokens + width - 1):
            step = engine.step(drafts)
            drafts = {}
            for name, token in step.tokens.items():
                first = SampledToken(token, step.likelihoods.get(name))
                found[name] += [first, *step.further.get(name, ())]
        for name in names:
            engine.drop(name)
        return list(found.values())

    def _batched_prompts(self, prompts: Sequence[int]) -> list[tuple[Answer, Answer]]:
        """Prefill prompts together. Return the first answers, decoded alone, with those to compare."""
        names = [f"prompt-{place}" for place in range(len(prompts))]
        tokens = [self._prompts[index][:-1] for index in prompts]
        self._engine.prefill(dict(zip(names, tokens, strict=True)))
        some = list(zip(prompts, names, strict=True))[: len(self._prompts)]
        pairs = [
            (self._answers([index], _STEPS, bases=[name])[0], self._alone[index]) for index, name in some
        ]
        for name in names:
            self._engine.drop(name)
        return pairs

    def _in_chunks(self, tokens: int) -> Answer:
        """Return the answer to the longest prompt, prefilled in chunks of `tokens`."""
        prompt, last = self._prompts[-1][:-1], len(self._prompts) - 1
        for first in range(0, len(prompt), tokens):
            self._engine.prefill({"chunked": prompt[first : first + tokens]})
        answer = self._answers([last], _STEPS, bases=["chunked"])[0]
        self._engine.drop("chunked")
        return answer


def _base(index: int) -> str:
    return f"base-{index}"


def _prompt(index: int, tokens: int) -> tuple[int, ...]:
    return tuple((31 * place + 7 * index) % 97 + 1 for place in range(tokens))


def _compared(found: Answer, right: Answer) -> tuple[int | None, float]:
    """Return the number of the first token that differs, and the largest difference of a logprob up to
    there."""
    difference = 0.0
    for number, (some, other) in enumerate(zip(found, right, strict=False), 1):
        difference = max([difference, *_differences(some.likelihood, other.likelihood)])
        if some.token != other.token:
            return number, difference
    return None, difference


def _differences(found: Logprob | None, right: Logprob | None) -> Iterator[float]:
    """Yield the differences of the most likely tokens' logprobs."""
    if found is None or right is None:
        return
    expected = dict(right.top)
    for token, logprob in found.top:
        apart = abs(logprob - expected.get(token, logprob))
        yield min(apart, _DIFFERENCE_MAX) if not math.isnan(apart) else _DIFFERENCE_MAX
