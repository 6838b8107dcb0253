"""Compare batched passes with passes of one row for ten families of tiny random models, in three types of
weights, on a CPU: `make exactness`, which writes `docs/exactness.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
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
"""The tables follow this mark."""
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


def tables(measured: Callable[[str, Callable[[Any], None]], Exactness]) -> str:
    lines = [f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, on a CPU.", ""]
    for name, convert in TYPES.items():
        lines += [
            f"### {name}",
            "",
            "| family | 2 rows | 4 rows | 8 rows | 16 rows | several tokens | prompts together | chunks |",
            "|---|---|---|---|---|---|---|---|",
            *(row(family, measured(family, convert).checks) for family in FAMILIES),
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def row(family: str, checks: Sequence[PassCheck]) -> str:
    """Return a family's line of the table."""
    kinds: list[Callable[[PassCheck], bool]] = [partial(_decodes, rows) for rows in (2, 4, 8, 16)]
    kinds += [partial(_is_of, kind) for kind in ("verify", "prompts", "chunks")]
    return f"| {family} | " + " | ".join(cell(list(filter(kind, checks))) for kind in kinds) + " |"


def _decodes(rows: int, check: PassCheck) -> bool:
    return check.kind == "decode" and check.rows == rows


def _is_of(kind: str, check: PassCheck) -> bool:
    return check.kind == kind


def cell(checks: Sequence[PassCheck]) -> str:
    """Return the worst of the results of a column."""
    if not checks:
        return "not run"
    difference = max(check.difference for check in checks)
    if differing := [check.differs_at for check in checks if check.differs_at is not None]:
        return f"token {min(differing)} ({difference:.0e})"
    return f"{difference:.0e}" if difference else "equal"


def main() -> None:
    preload_openblas(sys.argv)

    def measured(family: str, convert: Callable[[Any], None]) -> Exactness:
        print(family, flush=True)
        return compared(family, convert)

    before, mark, _ = TABLE.read_text(encoding="utf-8").partition(MARK)
    TABLE.write_text(before + mark + tables(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
