"""Architectures for each kind of layer, mask, threshold and refusal: rows generate what upstream generates
alone, whatever other rows do. `make zoo` runs every family of upstream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.mtp_models import HEADS
from tests.oracle import Oracle
from tests.worker import zoo
from tests.worker.zoo import ARCHITECTURES, differences, load
from worker.runner.drafters.mtp import HiddenStateProposer
from worker.runner.kv import buckets
from worker.runner.sampling.penalties import is_penalized
from worker.runner.verification import Verifier

ROWS = 5
SEEDS = {
    "dense": 9,
    "deepseek_v41": 2,
    "llama_4bit": 2,
    "afm7": 1,
    "deepseek_v32": 2,
    "longcat_flash_ngram": 9,
    "gemma4": 7,
    "llama4": 1,
    "rwkv7": 5,
    "jamba": 13,
    "nemotron_h": 8,
    "baichuan_m1": 2,
    "family-gpt_bigcode": 7,
    "family-minimax_m3_vl": 7,
    "family-cohere_compass": 4,
    "family-z1t": 13,
}
"""Seed, where it is not 0, of a small scenario in which rows are forked, restored, and cancelled or
preempted. `python -m tests.worker.zoo` runs any number of larger ones."""

DRAFTED = {"sliding": 5, "deepseek_v3": 1, "mamba2": 6, "kimi_linear": 1, "lfm2": 6}
"""Architectures of other kinds of layers that speculative verification supports than those below, and the
seeds of their scenarios. Their rows are fed drafts in most steps only, and forked, mostly restored, and
cancelled or preempted as well."""

DRAFT_MODELS = (
    ("hybrid", "hybrid", 12),
    ("gpt_oss", "dense", 0),
    (HEADS, "its own layers", 5),
)
"""Models and their drafters: the model itself (always accepted), another one (almost never),
or MTP layers; and the seeds of scenarios with every disturbance, as these are not run undrafted."""

ALIKE = {
    "exaone4": "sliding",
    "falcon_h1": "baichuan_m1",
    "gemma3n": "gemma4",
    "granitemoehybrid": "nemotron_h",
    "llama": "dense",
    "llama_sliding": "sliding",
    "mamba": "mamba2",
    "longcat_flash": "deepseek_v32",
    "mixtral": "gpt_oss",
    "olmo3": "sliding",
    "plamo2": "jamba",
    "qwen3_moe": "gpt_oss",
    "qwen3_next": "hybrid",
}
"""Architectures of the zoo whose layers, caches and masks another one also has: only `make zoo` runs them."""
_WITH_DRAFTERS = {name for name, *_ in DRAFT_MODELS}
MECHANISMS = (
    *(name for name in ARCHITECTURES if name not in {*ALIKE, *DRAFTED, *_WITH_DRAFTERS}),
    "family-gpt_bigcode",  # learned positions, looked up by one number for all rows
    "family-minimax_m3_vl",  # blocks of keys, cut wherever a row happens to be
    "family-cohere_compass",  # mlx-vlm: explicit positions in one axis
    "family-minimax_m3",  # mlx-vlm: caches of its own class, with more than keys and values
    "family-z1t",  # mlx-vlm: caches that do not report their size
)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink buffers and group steps so that short runs outgrow them and rows are grouped by length."""
    monkeypatch.setattr(buckets, "COLUMNS_STEP", 16)


@pytest.mark.parametrize("architecture", MECHANISMS)
def test_rows_say_what_they_say_alone(architecture: str, oracle: Oracle) -> None:
    seed = SEEDS.get(architecture, 0)
    assert differences(load(architecture), architecture, seed, oracle, ROWS, is_whole=True) == []


@pytest.mark.parametrize(
    ("architecture", "draft", "seed"),
    [*((name, None, seed) for name, seed in DRAFTED.items()), *DRAFT_MODELS],
)
def test_rows_that_are_fed_drafts_say_what_they_say_alone(
    architecture: str, draft: str | None, seed: int, oracle: Oracle
) -> None:
    use_mtp = architecture == HEADS
    model = load(architecture, None if use_mtp else draft)
    assert (model.engine.drafter is not None) == (draft is not None)
    assert isinstance(model.engine.drafter, HiddenStateProposer) or not use_mtp
    is_whole = draft is not None
    assert differences(model, architecture, seed, oracle, ROWS, is_whole=is_whole, drafted=True) == []


def test_so_do_rows_whose_drafts_are_all_drawn_at_once(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draw depends on the tokens before it: there are no grammars and no penalties."""
    monkeypatch.setattr(zoo, "_grammar", lambda row: None)
    draws = [sampling for sampling in zoo._DRAWS if not is_penalized(sampling)]
    monkeypatch.setattr(zoo, "_DRAWS", draws)
    assert len(draws) > 2
    drawn = 0
    at_once = Verifier._drawn_at_once

    def counted(group: Verifier, *given: Any) -> Any:
        nonlocal drawn
        drawn += 1
        return at_once(group, *given)

    monkeypatch.setattr(Verifier, "_drawn_at_once", counted)
    assert differences(load("dense"), "dense", 1, oracle, 9, drafted=True) == []
    assert drawn > 8
