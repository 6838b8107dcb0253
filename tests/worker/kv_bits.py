"""Quantized KV caches on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.kv_bits --seeds 10 --architecture dense

Plays scenarios of `tests.worker.zoo`, with drafts and without, and conversations with a prefix cache, with 8
and 4 bits and several positions at which rows are quantized. Prints what differs from `stream_generate` with
the same settings, and why an architecture is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.zoo import ARCHITECTURES, load, play
from worker.contract.engine import Model, ModelError
from worker.contract.kv_quantization import KVQuantization
from worker.engine.caches import grouping
from worker.preload import preload_openblas

SWITCHES = ((0, 2048), (0, 32), (30, 32), (50, 16))
"""`start` and `step`: at the prompt's end, at a multiple of 32, in prompts or answers, mostly in answers."""


def differences(model: Model, architecture: str, seed: int, oracle: Oracle) -> Iterator[str]:
    """Yield a description of each row and turn that differs from upstream's."""
    for drafted in (False, True) if model.engine.capabilities.ahead else (False,):  # type: ignore[attr-defined]
        for found in play(model, architecture, seed, oracle, drafted=drafted).differences:
            yield f"drafted {drafted}: {found}"
    if model.engine.shape is not None:
        yield from map(str, conversations.differences(model, architecture, seed, oracle)[1])


def _run(architecture: str, kv: KVQuantization, seeds: range, oracle: Oracle) -> int:
    model = load(architecture, kv_quantization=kv)
    wrong = 0
    for seed in seeds:
        for found in differences(model, architecture, seed, oracle):
            wrong += 1
            print(f"{architecture} {kv} seed {seed}: {found}", flush=True)
    return wrong


def main() -> int:
    """Return 1 if any answer differs."""
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description="Quantized KV caches, held against upstream alone.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES)
    arguments = parser.parse_args()
    grouping.COLUMNS_STEP = 16  # so that short rows outgrow their buffers
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    wrong = 0
    with Oracle() as oracle:
        for architecture in arguments.architecture or ARCHITECTURES:
            settings = [KVQuantization(bits, 32, *switch) for bits in (8, 4) for switch in SWITCHES]
            try:
                found = sum(_run(architecture, kv, seeds, oracle) for kv in settings)
            except ModelError as error:
                print(f"{architecture}: refused: {error}", flush=True)
                continue
            wrong += found
            print(f"{architecture}: {len(settings)} settings, {len(seeds)} seeds, {found} differ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
