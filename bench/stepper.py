"""One side of `bench.steps`: the engine of a checkout, or upstream's bare forward pass, as a process.

Commands and results are JSON lines over pipes. This file is started by its path, with the checkout's packages
on Python's path, so that the same code measures each side. Of a checkout it uses `bench.ours.load` and the
engine's contract alone.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker.process.preload import preload_openblas

CHUNK = 512
WARM_UP_STEPS = 4
SETTLING_STEPS = 24
"""Steps without drafts after which rows decode plainly again."""
DRAFT_EVERY, DRAFT_TOKENS, DRAFT_SHARE = 8, 4, 4
"""Steps from one draft to the next, its tokens, and the part of the rows, one in so many, that has one."""
Result = dict[str, Any]


class Engine:
    """The engine of a checkout."""

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx

        from bench.ours import load

        self._mx, self._engine = mx, load(folder).engine
        self._names: list[str] = []

    def open(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Replace all rows by rows with these prompts. Return the bytes of their caches over what each row
        would take alone: after the first steps, and at most until then, buffers of passes included."""
        self._engine.reset()
        self._mx.clear_cache()
        self._mx.reset_peak_memory()
        without = self._mx.get_active_memory()
        self._names = [str(number) for number in range(len(prompts))]
        for name, prompt in zip(self._names, prompts, strict=True):
            list(self._prefill(name, prompt))
        self._mx.reset_peak_memory()
        for name, prompt in zip(self._names, prompts, strict=True):
            self._start(name, prompt)
        for _ in range(WARM_UP_STEPS):
            self._engine.step()
        self._mx.synchronize()
        own = sum(self._engine.row_bytes(len(prompt)) for prompt in prompts)
        peak = self._mx.get_peak_memory() - without
        return {"memory": self._engine.cache_bytes() / own, "peak": peak / own}

    def _prefill(self, name: str, prompt: Sequence[int], chunk: int = CHUNK) -> Iterator[int]:
        """Prefill a prompt and yield each position reached. All new rows of an engine begin here."""
        if hasattr(self._engine, "expect_tokens"):
            self._engine.expect_tokens(name, len(prompt))
        for at in range(0, len(prompt) - 1, chunk):
            self._engine.prefill({name: prompt[at : min(at + chunk, len(prompt) - 1)]})
            yield at

    def _start(self, name: str, prompt: Sequence[int]) -> None:
        from worker.values import SamplingParams

        self._engine.start(name, prompt, len(prompt), SamplingParams())

    def steps(self, count: int) -> Result:
        """Return the seconds of each step."""
        return {"plain": self._timed([{}] * count)}

    def drafted_steps(self, count: int) -> Result:
        """Return the seconds of plain steps, and of those between steps with drafts."""
        self._timed([{}] * SETTLING_STEPS)
        plain = self._timed([{}] * count)
        drafts = [self._drafts(number) for number in range(SETTLING_STEPS)]
        times = zip(drafts, self._timed(drafts), strict=True)
        return {"plain": plain, "between": [seconds for draft, seconds in times if not draft]}

    def _drafts(self, step: int) -> dict[str, list[int]]:
        turn, rest = divmod(step, DRAFT_EVERY)
        names = self._names[turn % DRAFT_SHARE :: DRAFT_SHARE] or self._names
        return {} if rest else {name: [7 + turn] * DRAFT_TOKENS for name in names}

    def _timed(self, drafts: Sequence[dict[str, list[int]]]) -> list[float]:
        times = []
        for draft in drafts:
            began = time.perf_counter()
            self._engine.step(draft)
            times.append(time.perf_counter() - began)
        return times

    def chunks(self, prompt: Sequence[int], chunk: int) -> Result:
        """Return the bytes copied while a prompt is prefilled in chunks, over those of its cache."""
        self._engine.reset()
        copies = Copies(self._engine)
        with copies.counting():
            for _ in self._prefill("long", prompt, chunk):
                copies.look()
        return copies.over(self._engine.row_bytes(len(prompt)))

    def joins(self, prompts: Sequence[Sequence[int]], joining: Sequence[int]) -> Result:
        """Return the bytes copied while a row joins a batch of others, and while one leaves it, over those of
        the row that joins; plain steps included."""
        self.open(prompts)
        copies = Copies(self._engine)
        list(self._prefill("joining", joining))
        copies.look()
        found: Result = {}
        changes: dict[str, Callable[[], None]] = {
            "join": lambda: self._start("joining", joining),
            "leave": lambda: self._engine.drop(self._names[len(prompts) // 2]),
        }
        for name, change in changes.items():
            copies.forget()
            with copies.counting():
                change()
                for _ in range(WARM_UP_STEPS):
                    self._engine.step()
                    copies.look()
            found |= {f"{name} {key}": each for key, each in copies.over(self._row_bytes(joining)).items()}
        return found

    def _row_bytes(self, prompt: Sequence[int]) -> int:
        return int(self._engine.row_bytes(len(prompt)))


class Copies:
    """Counts bytes of KV caches that an engine copies, in two ways, of which either may miss some.

    `buffers`: of arrays that the engine holds at a new address, between two calls of `look`. It misses what
    is dropped before. `calls`: of the results of MLX's functions that copy. It misses writes to an array that
    something else still refers to, for which MLX copies all of it.
    """

    NAMES = ("concatenate", "contiguous", "pad", "repeat", "stack", "take", "take_along_axis", "where")

    def __init__(self, engine: Any) -> None:
        import mlx.core as mx

        self._mx, self._engine = mx, engine
        self._known: set[int] = set()
        self.buffers = self.calls = 0

    def forget(self) -> None:
        """Count from zero again."""
        self.buffers = self.calls = 0

    def look(self) -> None:
        """Count arrays at new addresses."""
        import numpy as np

        found = {np.asarray(array).__array_interface__["data"][0]: array.nbytes for array in self._arrays()}
        self.buffers += sum(nbytes for address, nbytes in found.items() if address not in self._known)
        self._known = set(found)

    def over(self, nbytes: int) -> Result:
        return {"buffers": self.buffers / nbytes, "calls": self.calls / nbytes}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of functions that copy."""
        plain = {name: getattr(self._mx, name) for name in self.NAMES}
        for name, function in plain.items():
            setattr(self._mx, name, self._counted(function))
        item = self._mx.array.__getitem__
        setattr(self._mx.array, "__getitem__", self._counted_item(item))  # noqa: B010 - mypy forbids the other
        try:
            yield
        finally:
            setattr(self._mx.array, "__getitem__", item)  # noqa: B010
            for name, function in plain.items():
                setattr(self._mx, name, function)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.calls += result.nbytes * _is_kv(result)
            return result

        return counted

    def _counted_item(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(array: Any, index: Any) -> Any:
            result = function(array, index)
            is_copy = any(isinstance(part, self._mx.array | list) for part in (index, *_parts(index)))
            self.calls += result.nbytes * (is_copy and _is_kv(result))
            return result

        return counted

    def _arrays(self) -> Iterator[Any]:
        """Yield all arrays that the engine holds and that can be keys or values."""
        passed = types.FunctionType, types.ModuleType, type
        seen, open_ = {id(self._engine)}, [self._engine]
        while open_:
            for each in gc.get_referents(open_.pop()):
                if id(each) in seen or isinstance(each, passed):
                    continue
                seen.add(id(each))
                if isinstance(each, self._mx.array):
                    if _is_kv(each):
                        yield each
                else:
                    open_.append(each)


def _parts(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple) else ()


def _is_kv(array: Any) -> bool:
    """Return whether an array has the shape of keys or values: [rows, heads, columns, width]."""
    return array.ndim == 4 and array.shape[2] > 1


class Bare:
    """Upstream's model, argmax, one step ahead, and nothing else."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.utils import load_model

        self._network: Any = load_model(folder)[0]

    def open(self, prompts: Sequence[Sequence[int]]) -> Result:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        rows = []
        for prompt in prompts:
            rows.append(caches := make_prompt_cache(self._network))
            for at in range(0, len(prompt) - 1, CHUNK):
                self._network(mx.array([prompt[at : min(at + CHUNK, len(prompt) - 1)]]), cache=caches)
                mx.eval([cache.state for cache in caches])
        layers: Any = zip(*rows, strict=True)
        self._caches = rows[0] if len(rows) == 1 else [layer[0].merge(list(layer)) for layer in layers]
        self._pending = mx.array([prompt[-1] for prompt in prompts])
        self.steps(WARM_UP_STEPS)
        return {}

    def steps(self, count: int) -> Result:
        """Return the seconds of each step."""
        import mlx.core as mx

        times = []
        for _ in range(count):
            began = time.perf_counter()
            sampled = mx.argmax(self._network(self._pending[:, None], cache=self._caches)[:, -1, :], axis=-1)
            mx.async_eval(sampled)
            self._pending.tolist()
            self._pending = sampled
            times.append(time.perf_counter() - began)
        return {"plain": times}


def main() -> None:
    preload_openblas(sys.argv)
    kind, folder = sys.argv[1:]
    side: Any = {"engine": Engine, "bare": Bare}[kind](Path(folder))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
