"""Decode steps compiled with `mx.compile`, beside plain ones: what they would gain, and what they need.

    python -m bench.compiled [--models dense,hybrid] [--folder .venv/models/smollm2] [--rows 1,16]

A compiled step needs arrays of fixed shape. So KV caches have `COLUMNS` columns from the start, the position
is an array, and a mask hides the columns behind it. The sides: upstream's growing caches, fixed caches, and
fixed caches with a compiled step, for greedy rows of one length. All must give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.timing import print_table
from worker.preload import preload_openblas

COLUMNS = 512
PROMPT_TOKENS = 126
WARM_UP, STEPS = 40, 260
SIDES = ("growing caches", "fixed caches", "fixed, compiled")
Side = Callable[[], tuple[list[Any], float]]
"""Returns the tokens of each step, and the seconds of a step."""


def run(names: Sequence[str], folders: Sequence[Path], batches: Sequence[int], rounds: int) -> None:
    """Print the milliseconds of a step on each side. Raises `RuntimeError` if the tokens differ."""
    from mlx_lm.utils import load

    from bench.models import bench_folder

    lines = []
    for folder in [*map(bench_folder, names), *folders]:
        loaded: tuple[Any, ...] = load(str(folder))
        for rows in batches:
            sides = [_growing(loaded[0], rows), _fixed(loaded[0], rows, False), _fixed(loaded[0], rows, True)]
            taken = _taken(sides, rounds, f"{folder.name}, {rows} rows")
            medians = [statistics.median(found) for found in taken]
            told = [f"{median:.2f}" for median in medians]
            lines.append([folder.name, str(rows), *told, f"{medians[2] / medians[0]:.2f}"])
    legend = f"Milliseconds of a step, median of {rounds} rounds; the last over the first."
    print_table("Greedy rows", ["", "rows", *SIDES, "ratio"], lines, legend)


def _taken(sides: Sequence[Side], rounds: int, about: str) -> list[list[float]]:
    """Return the milliseconds of a step on each side in each round."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        answers = []
        for side, found in zip(sides, taken, strict=True):
            tokens, seconds = side()
            answers.append(tokens)
            found.append(1000 * seconds)
        if not all(answer == answers[0] for answer in answers):
            raise RuntimeError(f"{about}: the tokens differ")
    return taken


def _prefilled(model: Any, rows: int) -> tuple[list[Any], Any]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from bench.models import random_tokens

    prompts = [random_tokens(PROMPT_TOKENS, seed=row) for row in range(1, rows + 1)]
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-1] for prompt in prompts]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches, mx.array([prompt[-1] for prompt in prompts])


def _decoded(step: Callable[[Any], Any], token: Any) -> tuple[list[Any], float]:
    """Return the tokens of each step, and the seconds of one behind the warm-up. `step` dispatches the
    next ones."""
    tokens, began = [], 0.0
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            began = time.perf_counter()
        following = step(token)
        tokens.append(token.tolist())
        token = following
    return tokens, (time.perf_counter() - began) / STEPS


def _growing(model: Any, rows: int) -> Side:
    import mlx.core as mx

    def side() -> tuple[list[Any], float]:
        caches, token = _prefilled(model, rows)

        def step(token: Any) -> Any:
            drawn = mx.argmax(model(token[:, None], cache=caches)[:, -1, :], axis=-1)
            mx.async_eval(drawn)
            return drawn

        return _decoded(step, token)

    return side


class FixedCache:
    """KV cache of `COLUMNS` columns for rows of one length, whose position is an array."""

    def __init__(self, cache: Any) -> None:
        """Copy upstream's `cache`, which must have fewer tokens."""
        import mlx.core as mx

        widths = [(0, 0), (0, 0), (0, COLUMNS - cache.offset), (0, 0)]
        self.keys, self.values = (
            mx.pad(each[..., : cache.offset, :], widths) for each in (cache.keys, cache.values)
        )
        self.offset = mx.array(cache.offset, mx.int32)

    @property
    def state(self) -> list[Any]:
        return [self.keys, self.values, self.offset]

    @state.setter
    def state(self, arrays: list[Any]) -> None:
        self.keys, self.values, self.offset = arrays

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        import mlx.core as mx

        at = self.offset.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, at, axes=[2])
        self.values = mx.slice_update(self.values, values, at, axes=[2])
        self.offset = self.offset + 1
        return self.keys, self.values

    def make_mask(self, *shape: Any, **options: Any) -> Any:
        import mlx.core as mx

        return (mx.arange(COLUMNS) <= self.offset)[None, None, None]


def _fixed(model: Any, rows: int, compiles: bool) -> Side:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    def side() -> tuple[list[Any], float]:
        before, token = _prefilled(model, rows)
        caches = [FixedCache(cache) if isinstance(cache, KVCache) else cache for cache in before]

        def step(token: Any, states: list[Any]) -> tuple[Any, list[Any]]:
            for cache, state in zip(caches, states, strict=True):
                cache.state = state
            drawn = mx.argmax(model(token[:, None], cache=caches)[:, -1, :], axis=-1)
            return drawn, [list(cache.state) for cache in caches]

        run = mx.compile(step) if compiles else step
        states = [list(cache.state) for cache in caches]

        def dispatched(token: Any) -> Any:
            nonlocal states
            drawn, states = run(token, states)
            mx.async_eval(drawn, states)
            return drawn

        return _decoded(dispatched, token)

    return side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="dense,hybrid", help="of `bench.models`")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="a further model")
    parser.add_argument("--rows", default="1,4,16", help="rows that decode together")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    names = [name for name in asked.models.split(",") if name]
    run(names, asked.folder, [int(rows) for rows in asked.rows.split(",")], asked.rounds)


if __name__ == "__main__":
    preload_openblas(sys.argv)
    main()
