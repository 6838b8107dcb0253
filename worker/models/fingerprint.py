"""What tells two models apart whose caches must never be taken for each other's.

Weights, their quantization and how they are run; not the tokenizer, nor the chat template: stored prefixes go
by tokens. Weights are known by their files' sizes and samples of their bytes, since to read all of them
would take as long as loading the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

SAMPLES = 32
SAMPLE_BYTES = 65_536


def fingerprint(config: Path, weights: Iterable[Path], versions: Mapping[str, str]) -> str:
    """32 hexadecimal digits. `versions`: of the libraries that lay the caches out."""
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


def _places(size: int) -> list[int]:
    """Where to read: spread evenly, the beginning (which holds the names and shapes) and the end included."""
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)})
