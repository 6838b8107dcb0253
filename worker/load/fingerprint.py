"""Model fingerprint: distinguishes models whose stored caches must never be mixed up.

It covers the weights, their quantization and how they are run. Tokenizer and chat template are left out,
because stored prefixes are keyed by tokens. Weights are identified by the headers of their files and a sample
of every tensor: reading all bytes would take as long as loading the model, and samples of a file would miss
a fine-tune that has changed some tensors only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from worker.values import ModelInfo

SAMPLE_BYTES = 4096
"""Bytes that are read in the middle of each tensor."""


def fingerprint(config: Path, weights: Iterable[Path], versions: Mapping[str, str]) -> str:
    """Return 32 hexadecimal digits. `versions`: of the libraries that determine the layout of caches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(sorted(versions.items())).encode())
    digest.update(config.read_bytes())
    for file in sorted(weights):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            digest.update(header)
            for middle in _middles(header):
                opened.seek(middle)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def lossy(facts: ModelInfo) -> dict[str, str]:
    """Return the settings that change what a model answers and what its caches contain; empty: none."""
    kv = facts.kv_quantization
    return {} if kv is None else {"kv": f"{kv.bits} {kv.group_size}"}


def _middles(header: bytes) -> list[int]:
    """Return where to read in a safetensors file with this header, in order."""
    entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    spans = sorted((first, last) for first, last in (entry["data_offsets"] for entry in entries))
    return [8 + len(header) + max(first, (first + last - SAMPLE_BYTES) // 2) for first, last in spans]
