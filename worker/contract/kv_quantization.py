"""KV cache quantization: how the KV caches of a worker are quantized, from the first token of each row on."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.settings.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """`bits` per value in groups of `group_size`, with a scale and a bias each."""

    bits: int
    group_size: int = 64


def kv_quantization_of(settings: WorkerSettings) -> KVQuantization | None:
    """Return how a worker quantizes KV caches; None: it does not."""
    return None if settings.kv_bits is None else KVQuantization(settings.kv_bits, settings.kv_group_size)
