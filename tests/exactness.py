"""Compare batched passes with passes of one row for ten families of tiny random models, in three types of
weights, on a CPU: `make exactness`, which writes `docs/exactness.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from protocol.types import Exactness, PassCheck
from tests.models.fixtures import model_folder
from worker.load.exactness import measure
from worker.process.preload import preload_openblas
from worker.runner.runner import BatchEngine

TABLE = Path("docs/exactness.md")
MARK = "<!-- make exactness -->\n"
"""The table follows this mark."""
FAMILIES = (
    "llama",
    "llama_sliding",
    "hybrid",
    "gemma4",
    "gpt_oss",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "mamba2",
    "falcon_h1",
)
"""A family for each kind of layer: attention, windows, gated delta, experts, latent attention, states."""

_GROUP = 32
_UNABLE = "Currently only supports float32"
"""What MLX says of experts in bfloat16 on a CPU."""


def in_bfloat16(network: Any) -> None:
    network.set_dtype(mx.bfloat16)


def in_4_bits(network: Any) -> None:
    """Quantize what can be quantized; the rest, and the activations, are bfloat16."""
    network.set_dtype(mx.bfloat16)
    nn.quantize(network, _GROUP, 4, class_predicate=_is_quantized)


def _is_quantized(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % _GROUP == 0


TYPES: dict[str, Callable[[Any], None]] = {
    "float32": lambda network: None,
    "bfloat16": in_bfloat16,
    "4 bit": in_4_bits,
}
KINDS = {"decode": "rows", "verify": "several tokens", "prompts": "prompts", "chunks": "chunks"}
"""Names of the kinds of passes in the table."""


def compared(family: str, convert: Callable[[Any], None]) -> Exactness:
    network: Any = load_model(model_folder(family))[0]
    convert(network)
    mx.eval(network.parameters())
    try:
        return measure(BatchEngine(network))
    except RuntimeError as error:
        if _UNABLE not in str(error):
            raise
        return Exactness()


def table(measured: Callable[[str, Callable[[Any], None]], Exactness]) -> str:
    lines = [
        f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, on a CPU.",
        "",
        f"| family | {' | '.join(TYPES)} |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        cells = (cell(measured(family, convert).checks) for convert in TYPES.values())
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(checks: Sequence[PassCheck]) -> str:
    """Return the worst result of each kind of passes; kinds whose results are equal are left out."""
    if not checks:
        return "not run"
    kinds = {name: worst([each for each in checks if each.kind == kind]) for kind, name in KINDS.items()}
    different = {name: result for name, result in kinds.items() if result}
    if len(different) == len(KINDS) and not any("token" in result for result in different.values()):
        return f"up to {max(different.values(), key=float)}"
    return "; ".join(f"{name}: {result}" for name, result in different.items()) or "equal"


def worst(checks: Sequence[PassCheck]) -> str:
    """Return the first token that differs and the largest difference; empty: the results are equal."""
    difference = max((check.difference for check in checks), default=0.0)
    if differing := [check.differs_at for check in checks if check.differs_at is not None]:
        return f"token {min(differing)} ({difference:.0e})"
    return f"{difference:.0e}" if difference else ""


def main() -> None:
    preload_openblas(sys.argv)

    def measured(family: str, convert: Callable[[Any], None]) -> Exactness:
        print(family, flush=True)
        return compared(family, convert)

    before, mark, _ = TABLE.read_text(encoding="utf-8").partition(MARK)
    TABLE.write_text(before + mark + table(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
