"""Measurement of all loads on all sides, alternating, so that noise of the machine affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.load import runner
from deploy.load.client import Target
from deploy.load.report import Rounds
from deploy.load.runner import Load
from deploy.load.samples import Summary, summarize

Tell = Callable[[str], None]
"""Called with a description of the current measurement."""


async def measure(
    sides: Mapping[str, Target], loads: Sequence[Load], rounds: int, seed: str, tell: Tell
) -> list[tuple[Load, Rounds]]:
    """Measure each load in `rounds` rounds on every side, in alternating order. Two requests before the first
    round warm up each side and measure its tokens per word. Raises `TargetError`."""
    scales = {name: await runner.scale_of(target) for name, target in sides.items()}
    results: list[tuple[Load, Rounds]] = []
    for load in loads:
        found: dict[str, list[Summary]] = {name: [] for name in sides}
        for number in range(rounds):
            names = list(sides)[:: -1 if number % 2 else 1]
            for name in names:
                tell(f"{load.name}, round {number + 1} of {rounds}, {name}")
                # Different prompts in every round, load and side, so that no prefix is cached, not even if
                # two sides are two models of one server.
                words = f"{seed} {load.name} {number} {name}"
                samples = await runner.run(sides[name], load, scales[name], words)
                found[name].append(summarize(samples))
        results.append((load, found))
    return results
