"""What is known at load of the exactness of a model's batched passes: measured once, cached, and told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from msgspec import structs

from protocol.types import Exactness, PassCheck
from worker.interfaces import ModelError
from worker.load.probe_results import ProbeResults
from worker.load.probes import row_counts
from worker.load.probes.chip import wrong_results
from worker.process.device_errors import raise_if_device_failed
from worker.runner.runner import BatchEngine
from worker.runner.trees import arrays_of

log = logging.getLogger(__name__)

Measurement = Literal["load", "exact", "table"]
"""What to measure: a few checks, on GPUs only; the limits of `--exact`, which are then applied; or the table
of `doctor`."""

_VARIABLES = ("MLX_METAL_GPU_ARCH", "MLX_ENABLE_TF32")
"""Variables on which MLX's choice of kernels depends."""
_REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What upstream's models and caches raise."""
_TOLD_MAX = 4


def determine(
    name: str,
    engine: BatchEngine,
    network: nn.Module,
    measurement: Measurement,
    results: ProbeResults,
    key_of: Callable[[], str],
) -> Exactness | None:
    """Return what is measured of a warm engine, or kept under its key; None: nothing. Resets the engine.
    Raises `ModelError` if the limits of `--exact` cannot be found."""
    if measurement == "load" and mx.default_device() == mx.cpu:
        return None
    variables = "".join(f"-{os.environ[name]}" for name in _VARIABLES if name in os.environ)
    key = f"{key_of()}-{measurement}{variables}" if measurement != "table" else ""
    try:
        found = results.read(key, Exactness) if key else None
        if found is None:
            found = _measured(engine, network, measurement)
            if key:
                results.write(key, found)
    except _REFUSALS as error:
        raise_if_device_failed(error)
        engine.reset()
        if measurement == "exact":
            raise ModelError(
                f"it cannot be measured which passes are exact ({error}): leave --exact out."
            ) from None
        log.warning("%s: whether batched passes are exact could not be measured: %s", name, error)
        return None
    if found.rows_max is not None:
        engine.limit_passes(found.rows_max, found.draft_tokens_max or 0)
    _tell(name, found)
    return found


def _measured(engine: BatchEngine, network: nn.Module, measurement: Measurement) -> Exactness:
    match measurement:
        case "load":
            found = row_counts.measure(engine)
        case "exact":
            found = row_counts.find_limits(engine)
        case "table":
            found = row_counts.measure(engine, row_counts.TABLE_CHECKS, row_counts.THOROUGH)
    return structs.replace(found, chip=wrong_results(*_types(network)))


def _types(network: Any) -> tuple[mx.Dtype, int | None]:
    """Return the type of most weights that are not packed, and the bits of packed ones."""
    sizes: dict[mx.Dtype, int] = {}
    for array in arrays_of(network.parameters()).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.nbytes
    bits = {module.bits for module in network.modules() if isinstance(module, nn.QuantizedLinear)}
    return max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32), min(bits, default=None)


def _tell(name: str, found: Exactness) -> None:
    for why in found.chip:
        log.error("%s: %s", name, why)
    if found.rows_max is not None:
        drafts = f"drafts are verified up to {found.draft_tokens_max} tokens at a time, row by row"
        log.info(
            "%s: --exact decodes at most %d rows in a pass; %s",
            name,
            found.rows_max,
            drafts if found.draft_tokens_max else "no drafts are verified",
        )
        if cuts := [check for check in found.checks if check.kind == "chunks" and not check.is_exact]:
            log.warning(
                "%s: --exact does not change how prompts are cut into chunks, which rounds differently: %s",
                name,
                _described(cuts[0]),
            )
        return
    inexact = [check for check in found.checks if not check.is_exact]
    tokens = [check for check in inexact if check.differs_at is not None]
    if inexact:
        log.log(
            logging.WARNING if tokens else logging.INFO,
            "%s: batched passes round differently on this device, so near ties may give another token; "
            "--exact avoids them: %s",
            name,
            "; ".join(_described(check) for check in (tokens or inexact)[:_TOLD_MAX]),
        )


def _described(check: PassCheck) -> str:
    what = {
        "decode": f"{check.rows} rows",
        "verify": f"{check.tokens} tokens of {check.rows} rows",
        "prompts": f"{check.rows} prompts together",
        "chunks": f"chunks of {check.tokens} tokens",
    }[check.kind]
    at = f"token {check.differs_at} differs, " if check.differs_at is not None else ""
    return f"{what}: {at}logprobs by up to {check.difference:.1g}"
