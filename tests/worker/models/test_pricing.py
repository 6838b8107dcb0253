"""What a column costs is measured with an engine that is warm: by a clock that forward passes move."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.models.fixtures import model_folder
from tests.worker.folders import nothing
from worker.contract import Model
from worker.engine.engine import BatchEngine
from worker.models.load import ModelLoader, warm_up
from worker.models.pricing import column_price


class Slow(nn.Module):
    """A network whose passes take a second, and `column_s` for each further token of a row; the pass of the
    number `late` one of another program's, too."""

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


@pytest.mark.parametrize("name", ["dense", "hybrid"])
@pytest.mark.parametrize("column_s", [0.0, 0.25, 1.0])
def test_it_is_what_a_token_adds_to_a_step(name: str, column_s: float) -> None:
    engine, network = slow(name, column_s)
    assert column_price(engine, lambda: network.now) == pytest.approx(column_s)
    assert engine.cache_bytes() == 0, "nothing is left of it"
    assert network.passes <= 9, "a start is not to take longer"


def test_one_pass_that_others_delay_changes_nothing() -> None:
    engine, network = slow("dense", 0.25)
    for late in range(1, 9):
        network.passes, network.late = 0, late
        assert column_price(engine, lambda: network.now) == pytest.approx(0.25), late


def test_columns_are_never_a_gain() -> None:
    engine, network = slow("dense", -0.2)
    assert column_price(engine, lambda: network.now) == 0


@pytest.mark.parametrize("has_drafts", [True, False])
def test_it_is_measured_where_there_may_be_drafts(has_drafts: bool) -> None:
    model = ModelLoader(str(model_folder("dense")), uses_heads=has_drafts).load(nothing)
    assert isinstance(model, Model)
    assert (model.column_price is not None) == has_drafts
