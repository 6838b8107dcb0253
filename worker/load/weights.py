"""Load a network's weights, evaluate them in groups, run each kind of step once, and measure some."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from protocol.common.temporary_folder import TemporaryFolder
from worker.interfaces import Engine, Progress
from worker.load.config import rope_overrides
from worker.values import PRICED_COLUMNS, SamplingParams

Open = Callable[[Path], Any]
"""Opens a folder's network with lazy parameters."""
GROUP_BYTES = 64 * 2**20
"""Bytes of weights that are evaluated before the next progress report."""
_WARM_PROMPT = (1, 2, 3, 4, 5)
_WARM_STEPS = 3
_PRICED_ROW = "priced"
_PRICED_DRAFTS = tuple(range(6, 5 + PRICED_COLUMNS))
_PRICED_LAPS = 2
"""Repetitions of each kind of step; the fastest counts, because the machine may be busy."""


def open_text(folder: Path) -> Any:
    """Open mlx-lm's model, an `mlx.nn.Module` with lazy parameters. Raises whatever upstream raises."""
    from mlx_lm.utils import load_model

    network, _ = load_model(folder, lazy=True, model_config=rope_overrides(folder))
    return network


def open_with_config(folder: Path, config: Mapping[str, Any], open_network: Open) -> Any:
    """Open a folder's network with another config."""
    with TemporaryFolder("config") as home:
        for file in folder.iterdir():
            if file.name != "config.json":
                (home / file.name).symlink_to(file.resolve())
        (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return open_network(home)


def load_weights(folder: Path, progress: Progress) -> Any:
    """Open mlx-lm's model and load its weights. Raises whatever upstream raises."""
    network = open_text(folder)
    evaluate(network, progress)
    return network


def evaluate(network: Any, progress: Progress) -> None:
    """Evaluate a network's parameters group by group, and report progress."""
    import mlx.core as mx

    from worker.runner.trees import arrays_of

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


def position_cost(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the price of a column in verify steps, as in `Model`. Resets the engine. The sequence of calls
    does not depend on results, because all ranks of a sharded model make it."""
    lap = partial(_lap, engine, clock)
    engine.prefill({_PRICED_ROW: _WARM_PROMPT[:-1]})
    engine.start(_PRICED_ROW, _WARM_PROMPT, len(_WARM_PROMPT), SamplingParams())
    wide = min(lap(_PRICED_DRAFTS) for _ in range(_PRICED_LAPS))
    engine.step()  # may feed accepted tokens again
    engine.step()  # starts the pipeline
    plain = min(lap(()) for _ in range(_PRICED_LAPS))
    engine.reset()
    return max(0.0, wide / plain - 1) / (PRICED_COLUMNS - 1)


def _lap(engine: Engine, clock: Callable[[], float], drafts: Sequence[int]) -> float:
    began = clock()
    engine.step({_PRICED_ROW: drafts} if drafts else {})
    return clock() - began
