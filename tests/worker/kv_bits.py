"""Quantized KV caches on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.kv_bits --seeds 10 --architecture dense

Plays scenarios of `tests.worker.zoo`, with drafts and without, and conversations with a prefix cache, with 8
and 4 bits and several positions at which rows are quantized. Prints what differs from `stream_generate` with
the same settings, and why an architecture is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.oracle import Oracle
from tests.worker import conversations
from tests.worker.zoo import main, play
from worker.contract.engine import Engine, Model
from worker.contract.kv_quantization import KVQuantization
from worker.engine.caches import grouping
from worker.engine.engine import BatchEngine

SWITCHES = ((0, 2048), (0, 32), (30, 32), (50, 16))
"""`start` and `step`: at the prompt's end, at a multiple of 32, in prompts or answers, mostly in answers."""


def prefill(
    engine: Engine, row: str, tokens: Sequence[int], kv: KVQuantization, chunk: int, done: int = 0
) -> None:
    """Run a prompt in chunks, but for its last token, and quantize it at its switch."""
    switch = kv.switch(len(tokens))
    while done < len(tokens) - 1:
        end = min(done + chunk, len(tokens) - 1, switch if done < switch else len(tokens))
        engine.prefill({row: tokens[done:end]})
        done = end
        if done == switch:
            engine.quantize_cache(row)


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
    both = [KVQuantization(bits, 32, *switch) for bits in (8, 4) for switch in SWITCHES]
    settings = [{"kv_quantization": kv} for kv in both]
    grouping.COLUMNS_STEP = 16  # so that short rows outgrow their buffers
    raise SystemExit(main("Quantized KV caches, held against upstream alone.", differences, settings))
