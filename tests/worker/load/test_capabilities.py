"""The table of capabilities says of a network what a probe of it says, and knows the families of the zoo."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mlx_lm.utils import _get_classes

from protocol.common.model_folder import POCKET
from tests.capabilities import is_numeric, probe
from tests.models.fixtures import model_folder
from tests.worker.folders import copied
from tests.zoo import families_in
from worker.load import capabilities
from worker.load.capabilities import capabilities_of, look_up, parts_of, read_table
from worker.load.probe_results import ProbeResults
from worker.load.source import weight_files
from worker.load.weights import open_text
from worker.runner.kv.capability_probe import BatchCapabilities

ALL = BatchCapabilities(True, True, True, True, True, True, True, True)
KINDS = ("dense", "hybrid", "sliding", "mixtral", "deepseek_v3", "lfm2", "llama4", "qwen3_5-eyes", POCKET)
"""Attention, gated delta, windows, experts, latent attention, convolutions, chunks, and mlx-vlm's."""


@pytest.mark.parametrize("model", KINDS)
def test_the_table_says_what_a_probe_says(model: str) -> None:
    probed = probe(model)
    lines = [line for line in read_table().families.values() if set(probed.parts) <= set(line.parts)]
    assert min(lines, key=lambda line: len(line.parts)).capabilities == probed.capabilities
    assert all(line.has_kernels == probed.has_kernels for line in lines)


def test_the_table_was_made_with_the_installed_versions() -> None:
    assert read_table().versions == {name: metadata.version(name) for name in ("mlx-lm", "mlx-vlm")}


def test_the_table_has_each_family_that_is_served_whose_verdict_hangs_on_no_number() -> None:
    served, reasons = families_in(Path("docs/models.md").read_text(encoding="utf-8"))
    assert len(served) > 180
    due = {family for family in served if not is_numeric(reasons.get(family, ""))}
    assert due <= set(read_table().families)


@pytest.mark.parametrize(
    "rotation",
    [
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
        },
    ],
)  # fmt: skip
def test_scaled_positions_are_known_as_plain_ones_and_a_probe_agrees(
    tmp_path: Path, rotation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path, "llama", rope_scaling=rotation, rope_parameters=None)
    network = open_text(folder)
    assert any("RoPE" in type(module).__name__ != "RoPE" for module in network.modules())
    assert look_up(network) == ALL
    monkeypatch.setattr(capabilities, "look_up", lambda network: None)
    found = capabilities_of(folder, network, weight_files(folder, "llama"), ProbeResults(None))
    assert replace(found, sparse=ALL.sparse) == ALL


_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False,
    "vocab_size": 128,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
_LONG = {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6, "type": "longrope"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Mistral 7B": {"model_type": "mistral", "sliding_window": 4096},
    "Qwen2.5": {
        "max_window_layers": 28, "model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False,
    },
    "Phi-4 mini": {
        "model_type": "phi3", "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": _LONG, "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, "model_type": "gpt_oss",
        "num_experts_per_tok": 2, "num_local_experts": 4, "rope_scaling": _YARN, "sliding_window": 128,
    },
    "Qwen3 30B-A3B": {
        "decoder_sparse_step": 1, "head_dim": 32, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "SmolLM3": {"model_type": "smollm3", "no_rope_layer_interval": 4},
}  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_models_with_the_layers_of_published_ones_are_known(config: dict[str, Any]) -> None:
    model, arguments = _get_classes(config)
    network = model(arguments.from_dict(_SIZES | {"max_position_embeddings": 131072} | config))
    assert look_up(network) == ALL


def test_what_the_table_does_not_know_is_probed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("dense")
    network, files, results = open_text(folder), weight_files(folder, "dense"), ProbeResults(tmp_path)
    table = read_table()
    assert look_up(network) == ALL
    parts = tuple(sorted(parts_of(network)))
    for unknown in (
        msgspec.structs.replace(table, versions=table.versions | {"mlx-lm": "0.0"}),
        msgspec.structs.replace(
            table, device="gpu", families={"a": capabilities.FamilyVerdict(parts, has_kernels=True)}
        ),
        msgspec.structs.replace(table, families={"a": capabilities.FamilyVerdict(parts[1:])}),
    ):
        monkeypatch.setattr(capabilities, "read_table", lambda unknown=unknown: unknown)
        assert look_up(network) is None
    assert capabilities_of(folder, network, files, results) == ALL
    monkeypatch.setattr(capabilities, "probe", None)  # a call would raise
    assert capabilities_of(folder, network, files, results) == ALL


@pytest.mark.parametrize(
    "refused",
    [
        BatchCapabilities(False, False, True, True, False, True, False, False, ("cannot be batched: it",)),
        replace(ALL, cut=False),
        replace(ALL, ahead=False),
        replace(ALL, reasons=("a reason",)),
    ],
)
def test_a_verdict_that_lacks_something_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: BatchCapabilities
) -> None:
    folder, results = model_folder("dense"), ProbeResults(tmp_path)
    network, files = open_text(folder), weight_files(folder, "dense")
    monkeypatch.setattr(capabilities, "look_up", lambda network: None)
    monkeypatch.setattr(capabilities, "probe", lambda *given: refused)
    assert capabilities_of(folder, network, files, results) == refused
    assert not list(tmp_path.iterdir())
