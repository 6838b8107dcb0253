"""All loads on all sides, in turns, so that a noisy machine troubles the sides alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.load import drive
from deploy.load.client import Target
from deploy.load.drive import Load
from deploy.load.report import Rounds
from deploy.load.samples import Summary, summarize

Tell = Callable[[str], None]
"""Told what is being measured."""


async def measure(
    sides: Mapping[str, Target], loads: Sequence[Load], rounds: int, seed: str, tell: Tell
) -> list[tuple[Load, Rounds]]:
    """Each load in so many rounds on every side; who goes first takes turns. A request before each side's
    first round warms it up, and tells what its tokens are. Raises `TargetError`."""
    scales = {name: await drive.scale_of(target) for name, target in sides.items()}
    results: list[tuple[Load, Rounds]] = []
    for load in loads:
        found: dict[str, list[Summary]] = {name: [] for name in sides}
        for number in range(rounds):
            names = list(sides)[:: -1 if number % 2 else 1]
            for name in names:
                tell(f"{load.name}, round {number + 1} of {rounds}, {name}")
                # Others in every round, load and side: nobody finds them cached, not even where two sides
                # are two models of one server.
                words = f"{seed} {load.name} {number} {name}"
                samples = await drive.run(sides[name], load, scales[name], words)
                found[name].append(summarize(samples))
        results.append((load, found))
    return results
