"""Measurement of a verify column's cost with a warm engine, on a clock that forward passes advance."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from worker.load.weights import position_cost, warm_up
from worker.runner.runner import BatchEngine


class Slow(nn.Module):
    """A network whose passes take a second plus `column_s` per additional token of a row. Pass number `late`
    also includes another program's time."""

    def __init__(self, network: Any, column_s: float, late: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = network
        self.column_s = column_s
        self.late = late
        self.now = 0.0
        self.passes = 0

    @property
    def layers(self) -> Any:
        return self.network.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.network)

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self.now += 1 + self.column_s * (tokens.shape[1] - 1)
        self.passes += 1
        if self.passes == self.late:
            self.now += 10
        return self.network(tokens, cache=cache)


def slow(name: str, column_s: float) -> tuple[BatchEngine, Slow]:
    network = Slow(load_model(model_folder(name))[0], column_s)
    engine = BatchEngine(network)
    warm_up(engine, rows=2)
    network.passes = 0
    return engine, network


@pytest.mark.parametrize("column_s", [0.0, 0.25, 1.0, -0.2])
def test_it_is_what_a_token_adds_to_a_step_and_never_a_gain(column_s: float) -> None:
    name = "hybrid" if column_s == 1.0 else "dense"
    engine, network = slow(name, column_s)
    assert position_cost(engine, lambda: network.now) == pytest.approx(max(0.0, column_s))
    assert engine.cache_bytes() == 0, "the measurement must leave no cache behind"
    assert network.passes <= 9, "the measurement must not slow the start"


def test_one_pass_that_others_delay_changes_nothing() -> None:
    engine, network = slow("dense", 0.25)
    for late in range(1, 9):
        network.passes, network.late = 0, late
        assert position_cost(engine, lambda: network.now) == pytest.approx(0.25), late
