"""Model fingerprint: distinguishes models whose stored caches must never be mixed up.

It covers the weights, their quantization and how they are run. Tokenizer and chat template are left out,
because stored prefixes are keyed by tokens. Weights are identified by file sizes and samples of their bytes:
reading all of them would take as long as loading the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from worker.contract.engine import ModelInfo

SAMPLES = 32
SAMPLE_BYTES = 65_536


def fingerprint(config: Path, weights: Iterable[Path], versions: Mapping[str, str]) -> str:
    """Return 32 hexadecimal digits. `versions`: of the libraries that determine the layout of caches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(sorted(versions.items())).encode())
    digest.update(config.read_bytes())
    for file in sorted(weights):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for place in _places(size):
                opened.seek(place)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def lossy(facts: ModelInfo) -> dict[str, str]:
    """Return the settings that change what a model answers and what its caches contain; empty: none."""
    kv = facts.kv_quantization
    return {} if kv is None else {"kv": f"{kv.bits} {kv.group_size}"}


def _places(size: int) -> list[int]:
    """Return evenly spread offsets to read at, including the start (names and shapes) and the end."""
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)})
