"""Exactness: whether passes over several rows or tokens give the results of passes over one. `doctor`
measures it and keeps the result, and `--exact` keeps to what was measured.

MLX picks its kernels by the number of rows: on Metal a step of one row and one of two may round differently
(mlx 3764, 3888), and where two tokens are nearly tied, the other one is chosen. This depends on the chip, the
weights' type and MLX's version, so it is measured: a few prompts of unequal lengths are answered alone, then
again in each kind of pass, and tokens and logprobs are compared.

The products of matrices are compared with the CPU's as well. A wrong one is not rounding: on chips of the M5
generation, some builds of MLX return unrelated numbers for products of more than a few rows (mlx 3585), and
float32 products with the precision of TF32 (mlx 3534). They have the size from which these kernels are
chosen.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from msgspec import structs

from protocol.types import Exactness, PassCheck
from worker.interfaces import ModelError
from worker.load.probe_results import key_of
from worker.process.device_errors import raise_if_device_failed
from worker.runner.kv.buckets import FED_MAX
from worker.runner.kv.capability_probe import REFUSALS
from worker.runner.runner import BatchEngine
from worker.runner.trees import arrays_of
from worker.values import Logprob, SampledToken, SamplingParams

log = logging.getLogger(__name__)

ExactnessUse = Literal["none", "limits", "measure"]
"""What a load does about exactness: nothing; keep to the limits that were measured (`--exact`); or measure
and keep them (`doctor`)."""
UNMEASURED = Exactness(is_complete=False, rows_max=1, draft_tokens_max=0)
"""The limits without a measurement: each row has passes of its own."""
ROWS_MAX = 16
"""Highest number of rows that is measured, and so the most that `--exact` allows in a pass."""
MEASURE_S_MAX = 300.0
"""Maximum duration of a measurement, up to the end of the check that is then running."""
_VARIABLES = ("MLX_METAL_GPU_ARCH", "MLX_ENABLE_TF32")
"""Variables on which MLX's choice of kernels depends."""
_LENGTHS = (5, 12, 40)
"""Tokens of the prompts."""
_TOKENS = FED_MAX + 4
"""Tokens of each answer alone."""
_SAMPLING = SamplingParams(logprobs=8)
_STEPS = 6
"""Tokens that are compared beyond those of the first pass, at most."""
_DIFFERENCE_MAX = 1e9
"""Stands for differences that are not numbers."""

CHECKS = (
    *(PassCheck(kind="decode", rows=rows) for rows in (2, 4, 8, 16)),
    *(PassCheck(kind="prompts", rows=rows) for rows in (2, 8)),
    *(PassCheck(kind="chunks", rows=1, tokens=tokens) for tokens in (1, 8)),
    *(PassCheck(kind="verify", rows=rows, tokens=tokens) for rows in (1, 4) for tokens in (2, 4, 8, 16)),
)
"""The table of `doctor`."""

SHAPE = (64, 3072, 12288)
"""Rows, inner size and columns of the products."""
_COMPARED = 48
"""Every so many columns are compared: the CPU is slow."""
_WRONG = 0.05
"""Difference, relative to the largest number of the product, beyond any rounding."""
_IMPRECISE = 1e-4
"""The same for float32."""
_GROUP = 64
_KERNELS = "reinstall MLX, or set MLX_METAL_GPU_ARCH=applegpu_g15, which avoids these kernels (mlx 3585)"
_TF32 = "set MLX_ENABLE_TF32=0 (mlx 3534)"

Weights = Sequence[mx.array]
"""[columns, inner]; quantized: packed, with scales and biases."""

Answer = Sequence[SampledToken]


def exactness_key(folder: Path, weights: Iterable[Path], network: object, *settings: str) -> str:
    """Return the key of a model's measurement. `settings`: with which it is loaded and which change its
    passes."""
    variables = (f"{name}={os.environ.get(name)}" for name in _VARIABLES)
    return key_of(folder, weights, network, "exactness", *settings, *variables)


def measure_model(engine: BatchEngine, network: nn.Module) -> Exactness:
    """Measure a warm engine, and the products of its device. Resets the engine. Raises `ModelError`."""
    try:
        return structs.replace(measure(engine, limits=True), chip=wrong_results(*_types(network)))
    except REFUSALS as error:
        raise_if_device_failed(error)
        raise ModelError(f"it cannot be measured which of its passes are exact ({error}).") from None


def limit_passes(name: str, engine: BatchEngine, found: Exactness | None) -> Exactness:
    """Limit an engine to the passes that were measured to be equal, bit by bit; where nothing was measured,
    to those of one row. Return the limits."""
    limits = found or UNMEASURED
    engine.limit_passes(limits.rows_max or 1, limits.draft_tokens_max or 0)
    if found is None:
        log.warning(
            "%s: --exact decodes each row in passes of its own, because which others are exact was not"
            " measured: `roundhouse doctor --model` measures it, once for each model, device and version",
            name,
        )
        return limits
    width = limits.draft_tokens_max
    drafts = f"drafts are verified up to {width} tokens at a time, row by row" if width else "no drafts"
    log.info("%s: --exact decodes at most %d rows in a pass; %s", name, limits.rows_max, drafts)
    if any(check.kind == "chunks" and not check.is_exact for check in limits.checks):
        log.warning("%s: how a prompt is cut into chunks rounds differently, also with --exact", name)
    return limits


def measure(
    engine: BatchEngine,
    checks: Sequence[PassCheck] = CHECKS,
    *,
    limits: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Exactness:
    """Return the results of `checks`, of those kinds that the engine runs. `limits`: also the limits within
    which every measured pass equals passes of one row, bit by bit; what was not measured is outside of them.
    Resets the engine."""
    over_at = clock() + MEASURE_S_MAX
    results: dict[PassCheck, PassCheck] = {}
    is_complete = True
    with _Trial(engine) as trial:

        def is_exact(check: PassCheck) -> bool:
            nonlocal is_complete
            if check not in results and _is_run(engine, check):
                if clock() >= over_at:
                    is_complete = False
                    return False
                results[check] = trial.run(check)
            return check in results and results[check].is_exact

        for check in checks:
            is_exact(check)
        found = Exactness(checks=list(results.values()))
        if limits:
            rows = (PassCheck(kind="decode", rows=rows) for rows in range(2, ROWS_MAX + 1))
            widths = (PassCheck(kind="verify", rows=1, tokens=tokens) for tokens in range(2, FED_MAX + 1))
            rows_max = max([1, *(check.rows for check in takewhile(is_exact, rows))])
            width = max([0, *(check.tokens for check in takewhile(is_exact, widths))])
            found = structs.replace(found, rows_max=rows_max, draft_tokens_max=width)
    return structs.replace(found, is_complete=is_complete)


def _types(network: Any) -> tuple[mx.Dtype, int | None]:
    """Return the type of most weights that are not packed, and the bits of packed ones."""
    sizes: dict[mx.Dtype, int] = {}
    for array in arrays_of(network.parameters()).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.nbytes
    bits = {module.bits for module in network.modules() if isinstance(module, nn.QuantizedLinear)}
    return max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32), min(bits, default=None)


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

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._prompts = [_prompt(index, length) for index, length in enumerate(_LENGTHS)]
        self._alone: list[Answer] = []

    def __enter__(self) -> _Trial:
        for index, prompt in enumerate(self._prompts):
            self._engine.prefill({_base(index): prompt[:-1]})
        for index in range(len(self._prompts)):
            self._alone += self._answers([index], _TOKENS)
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
        while min(map(len, found.values())) < min(_TOKENS, tokens + width - 1):
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


def wrong_results(dtype: mx.Dtype, bits: int | None) -> list[str]:
    """Return what is wrong with this device's products, and what avoids it; empty on a CPU. `dtype`: of the
    activations. `bits`: of quantized weights; None: they are not quantized."""
    if mx.default_device() == mx.cpu:
        return []
    found = [compare(dtype, each) for each in dict.fromkeys((None, bits))]
    mx.clear_cache()
    return [why for why in found if why]


def multiply(left: mx.array, weights: Weights, bits: int | None) -> mx.array:
    """Multiply [rows, inner] by the transposed weights on the device."""
    if bits is None:
        return left @ weights[0].T
    packed, scales, biases = weights
    return mx.quantized_matmul(left, packed, scales, biases, group_size=_GROUP, bits=bits)


def compare(
    dtype: mx.Dtype,
    bits: int | None = None,
    multiply: Callable[[mx.array, Weights, int | None], mx.array] = multiply,
    shape: tuple[int, int, int] = SHAPE,
) -> str:
    """Return what is wrong with products of weights of this type; empty: nothing."""
    rows, inner, columns = shape
    left = mx.random.normal((rows, inner), key=mx.random.key(1)).astype(dtype)
    weights: Weights = (mx.random.normal((columns, inner), key=mx.random.key(2)).astype(dtype),)
    if bits is not None:
        weights = mx.quantize(weights[0], _GROUP, bits)
    found = multiply(left, weights, bits)[:, ::_COMPARED].astype(mx.float32)
    some = [each[::_COMPARED] for each in weights]
    right = some[0] if bits is None else mx.dequantize(some[0], some[1], some[2], _GROUP, bits)
    with mx.stream(mx.cpu):
        expected = left.astype(mx.float32) @ right.astype(mx.float32).T
        difference = float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected)))
    return _told(dtype, difference, bits)


def _told(dtype: mx.Dtype, difference: float, bits: int | None) -> str:
    name = str(dtype).rpartition(".")[2]
    kind = name if bits is None else f"{bits}-bit"
    if not difference <= _WRONG:
        return f"{kind} matrix products are wrong on this device: {_KERNELS}"
    if dtype == mx.float32 and bits is None and difference > _IMPRECISE:
        return f"float32 matrix products are imprecise on this device: {_TF32}"
    return ""
