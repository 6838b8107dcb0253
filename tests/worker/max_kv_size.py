"""Capped KV caches on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.max_kv_size --seeds 10 --architecture dense

Plays scenarios of `tests.worker.zoo`, with drafts and without, and conversations with a prefix cache, with
several caps and prefill steps. Prints what differs from `stream_generate` with the same settings, and why an
architecture is refused.
"""

from __future__ import annotations

import argparse
import sys

from tests.oracle import Oracle
from tests.worker.kv_bits import differences
from tests.worker.zoo import ARCHITECTURES, load
from worker.contract.engine import ModelError
from worker.contract.kv_cap import KVCap
from worker.engine.caches import grouping
from worker.preload import preload_openblas

CAPS = (KVCap(16, step=32), KVCap(24, step=16), KVCap(50, step=20), KVCap(8), KVCap(100))
"""Below a prefill step and above one, and upstream's step, longer than any prompt."""


def _run(architecture: str, cap: KVCap, seeds: range, oracle: Oracle) -> int:
    model = load(architecture, kv_cap=cap)
    wrong = 0
    for seed in seeds:
        for found in differences(model, architecture, seed, oracle):
            wrong += 1
            print(f"{architecture} {cap} seed {seed}: {found}", flush=True)
    return wrong


def main() -> int:
    """Return 1 if any answer differs."""
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description="Capped KV caches, held against upstream alone.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES)
    arguments = parser.parse_args()
    grouping.COLUMNS_STEP = 16  # so that short rows outgrow their buffers
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    wrong = 0
    with Oracle() as oracle:
        for architecture in arguments.architecture or ARCHITECTURES:
            try:
                found = sum(_run(architecture, cap, seeds, oracle) for cap in CAPS)
            except ModelError as error:
                print(f"{architecture}: refused: {error}", flush=True)
                continue
            wrong += found
            print(f"{architecture}: {len(CAPS)} caps, {len(seeds)} seeds, {found} differ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
