"""Quantized KV caches on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.kv_bits --seeds 10 --architecture dense

Plays scenarios of `tests.worker.zoo`, with drafts and without, and conversations with a prefix cache, with 8
and 4 bits. Prints what differs from `stream_generate` on such caches, and why an architecture is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.zoo import main, play
from worker.interfaces import Model
from worker.runner.kv import buckets
from worker.runner.runner import BatchEngine
from worker.values import KVQuantization


def network_of(model: Model) -> Any:
    assert isinstance(model.engine, BatchEngine)
    return model.engine._model


def differences(model: Model, architecture: str, seed: int, oracle: Oracle) -> Iterator[str]:
    """Yield a description of each row and turn that differs from upstream's."""
    for drafted in (False, True) if model.engine.capabilities.ahead else (False,):  # type: ignore[attr-defined]
        for found in play(model, architecture, seed, oracle, drafted=drafted).differences:
            yield f"drafted {drafted}: {found}"
    if model.engine.shape is not None:
        yield from map(str, conversations.differences(model, architecture, seed, oracle)[1])


if __name__ == "__main__":
    settings = [{"kv_quantization": KVQuantization(bits, 32)} for bits in (8, 4)]
    buckets.COLUMNS_STEP = 16  # so that short rows outgrow their buffers
    raise SystemExit(main("Quantized KV caches, held against upstream alone.", differences, settings))
