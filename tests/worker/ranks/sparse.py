"""Rows with skipped prompt spans: a group of ranks against one process."""

from __future__ import annotations

import random

from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from worker.contract.engine import Engine, SamplingParams
from worker.engine.engine import BatchEngine

ROWS = 4
STEPS = 24
_DRAFTED = range(10, 14)
"""Steps in which rows without gaps get drafts."""

Jobs = dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]]
"""Each row's prompt, and its skipped spans."""


def draw_jobs(seed: int) -> Jobs:
    """Draw prompts with skipped spans; one row in four has none."""
    rng = random.Random(seed)
    jobs: Jobs = {}
    for number in range(ROWS):
        prompt = tuple(rng.randrange(1, 90) for _ in range(rng.randint(40, 70)))
        borders = sorted(rng.sample(range(4, len(prompt) - 4), 4))
        spans = [(borders[0], borders[1]), (borders[2], borders[3])] if number else []
        jobs[f"row {number}"] = prompt, spans
    return jobs


def says(engine: Engine, jobs: Jobs) -> dict[str, list[int]]:
    """Return the answers of all rows, which join one after another."""
    said: dict[str, list[int]] = {row: [] for row in jobs}
    coming = list(jobs)
    for step in range(STEPS):
        if coming and step % 3 == 0:
            _begin(engine, coming[0], *jobs[coming.pop(0)])
        drawn = engine.step({"row 0": (5, 6)} if step in _DRAFTED else {})
        for row, token in drawn.tokens.items():
            said[row] += [token, *(each.token for each in drawn.further.get(row, ()))]
    for row in jobs:
        engine.drop(row)
    return said


def _begin(engine: Engine, row: str, prompt: tuple[int, ...], spans: list[tuple[int, int]]) -> None:
    at = 0
    for first, last in spans:
        engine.prefill({row: prompt[at:first]})
        engine.skip_tokens(row, first, last)
        at = last
    engine.prefill({row: prompt[at:-1]})
    engine.start(row, prompt, len(prompt), SamplingParams())


def differing(engine: Engine, model: str, seed: int) -> list[str]:
    """Return the rows whose answers differ from those of one process."""
    jobs = draw_jobs(seed)
    alone = says(BatchEngine(load_model(model_folder(model))[0]), jobs)
    said = says(engine, jobs)
    assert min(map(len, alone.values())) > STEPS // 3
    return [row for row in jobs if said[row] != alone[row]]
