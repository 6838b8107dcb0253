"""Load a network's weights, evaluate them in groups, and run each kind of step once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker.contract.engine import Engine, Progress, SamplingParams

GROUP_BYTES = 64 * 2**20
"""Bytes of weights that are evaluated before the next progress report."""
_WARM_PROMPT = (1, 2, 3, 4, 5)
_WARM_STEPS = 3


def load_weights(folder: Path, progress: Progress) -> Any:
    """Load mlx-lm's model, an `mlx.nn.Module`, and its weights. Raises whatever upstream raises."""
    from mlx_lm.utils import load_model

    network, _ = load_model(folder, lazy=True)
    evaluate(network, progress)
    return network


def evaluate(network: Any, progress: Progress) -> None:
    """Evaluate a network's parameters group by group, and report progress."""
    import mlx.core as mx

    from worker.engine.trees import arrays_of

    parameters = list(arrays_of(network.parameters()).values())
    total = sum(parameter.nbytes for parameter in parameters)
    progress(0, total)
    done = evaluated = 0
    group: list[mx.array] = []
    for index, parameter in enumerate(parameters):
        group.append(parameter)
        done += parameter.nbytes
        if done - evaluated >= GROUP_BYTES or index == len(parameters) - 1:
            mx.eval(group)
            evaluated = done
            group.clear()
            progress(done, total)


def warm_up(engine: Engine, rows: int) -> None:
    """Run each kind of step once, so that no request waits for kernels to compile."""
    draws = (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1))
    names = [str(row) for row in range(rows)]
    engine.prefill(dict.fromkeys(names, _WARM_PROMPT[:-1]))
    for row, sampling in zip(names, draws, strict=False):
        engine.start(row, _WARM_PROMPT, len(_WARM_PROMPT), sampling)
    for _ in range(_WARM_STEPS):
        engine.step()
    engine.reset()
