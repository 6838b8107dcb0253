"""`rope_parameters` in each of upstream's families: what it reads is what the older keys say."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import _get_classes

from tests.models.families import PREFIX, config_of, listed
from tests.worker.folders import copied
from worker.load.config import rope_overrides, translated_rope
from worker.load.weights import open_text

BASE = 123456.0
BASES = ("rope_theta", "rotary_emb_base", "rope_embedding_base")
FOREIGN = {"olmo"}
"""Its module ends the process without a package that is not installed."""
OWN = {"glm_moe_dsa", "laguna", "mellum", "mistral3", "mistral4", "qwen2_vl", "qwen3", "qwen3_vl", "spark2_5"}
"""Read `rope_parameters`, or hand their text config on as a whole."""


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return what upstream's arguments make of a config, but for the new key itself."""
    _, arguments = _get_classes(config)
    fields = vars(arguments.from_dict(config)).items()
    return {key: value for key, value in fields if key != "rope_parameters"}


@pytest.mark.parametrize("family", sorted({*listed()} - FOREIGN - OWN))
def test_a_familys_arguments_are_the_same_in_either_form(family: str) -> None:
    config = dict(config_of(PREFIX + family))
    _, arguments = _get_classes(config)
    known = inspect.signature(arguments).parameters
    old = arguments_of(config | {name: BASE for name in BASES if name in known})
    parameters = {"rope_type": "default", **config.pop("rope_parameters", {}), "rope_theta": BASE}
    new = {name: it for name, it in config.items() if name not in BASES} | {"rope_parameters": parameters}
    assert arguments_of(new | translated_rope(new, known)) == old


def test_the_network_is_the_same_in_either_form(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = copied(tmp_path / "old", "llama", rope_theta=BASE, rope_scaling=scaling)
    new = copied(
        tmp_path / "new",
        "llama",
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={**scaling, "rope_theta": BASE},
    )
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(open_text(old)(tokens), open_text(new)(tokens))
    assert rope_overrides(old) == {}
    assert rope_overrides(new) == {"rope_theta": BASE, "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": BASE}}, {}),  # what is said stays
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": BASE},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                }
            },
            {
                "rope_theta": BASE,
                "rope_local_base_freq": 10.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            {"text_config": {"rope_parameters": {"rope_theta": BASE, "partial_rotary_factor": 0.5}}},
            {
                "text_config": {
                    "rope_parameters": {"rope_theta": BASE, "partial_rotary_factor": 0.5},
                    "rope_theta": BASE,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        ({"rope_parameters": None}, {}),
    ],
)
def test_layer_kinds_and_inner_configs_are_translated(config: dict[str, Any], told: dict[str, Any]) -> None:
    assert translated_rope(config) == told


def test_a_language_model_gets_the_keys_that_it_has() -> None:
    """Of mlx-vlm's, most ignore others, and GLM-OCR fails on them."""
    config = {"text_config": {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}}
    assert translated_rope(config, text=["rope_parameters"]) == {}
    told = translated_rope(config, text=["rope_parameters", "rope_theta"])
    assert told == {"text_config": config["text_config"] | {"rope_theta": 5e5}}
