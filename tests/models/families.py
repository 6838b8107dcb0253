"""Tiny configs for every family of mlx-lm, or the reason why there is none.

Thresholds such as a window lie between a few tokens and a prompt's length, so that prompts end on both sides
of them. Families of the zoo have their configs there.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from tests.models import whole_families
from tests.models.configs import Config
from tests.models.family_sizes import WIDTH, nesting, of, thirds
from tests.models.zoo import ZOO

REFUSED = {
    "bitnet": "its layers are Metal kernels, and this machine has no Metal",
    "muse_spark": "its attention is a Metal kernel, and this machine has no Metal",
    "olmo": "upstream asks for the package ai2-olmo, which no longer installs beside it",
}
"""Families that the loader must refuse with an explanatory sentence, and the reason."""

CUT_SHOWS = {
    "phi3small": "its blocks are cut from the end of a piece",
    "plamo3": "its masks are a token wider than the window that is kept",
}
"""Families whose output depends, in upstream alone, on where a prompt is split into chunks, and the
reason."""

PREFIX = "family-"
"""Prefix of a family's model name; the zoo has models of the same names."""
THIRDS = "thirds-"
"""Prefix of the variant whose sizes are divisible by three."""

_ROTATED: Config = {"rope_theta": 10000.0, "rope_type": "default"}
_SCALED: Config = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32, **_ROTATED}
_BY_LAYER: Config = dict.fromkeys(("full_attention", "sliding_attention"), _ROTATED)
_DELTA_LAYERS: Config = {
    "linear_attn_config": {
        "full_attn_layers": [2], "gate_lower_bound": -5.0, "head_dim": 32, "kda_layers": [1, 3],
        "num_heads": 2, "short_conv_kernel_size": 4,
    },
    "num_hidden_layers": 3, "num_key_value_heads": 4,
}  # fmt: skip
_SPARSE: Config = {
    "sparse_block_size": 8, "sparse_index_dim": 32, "sparse_num_index_heads": 2, "sparse_topk_blocks": 3,
}  # fmt: skip
_DELTA: Config = {"full_attention_interval": 2, "layer_types": None, "tie_word_embeddings": True}


def _gemma4_text() -> Config:
    return ZOO["gemma4"]


def _nemotron_nas() -> Config:
    blocks = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ]
    return of("nemotron-nas", block_configs=blocks, layer_types=None, num_hidden_layers=3)


def _muse_spark() -> Config:
    text = of(
        "muse_spark_text", final_logit_softcapping=30.0, layer_rope_theta=[10000.0, 0],
        moe_hidden_size=WIDTH, num_shared_experts=0, output_multiplier=1.0, post_norm_eps=1e-6,
        rope_parameters=_ROTATED,
    )  # fmt: skip
    return nesting("muse_spark", text) | {"audio_config": {"out_hidden_size": WIDTH}}


def _mimo_v2_flash() -> Config:
    return of(
        "mimo_v2_flash", add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True,
        hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 1], swa_head_dim=32, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_v_head_dim=32,
    )  # fmt: skip


def _dbrx() -> Config:
    return of(
        "dbrx",
        attn_config={"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": WIDTH, "moe_num_experts": 4, "moe_top_k": 2},
    )


def _openelm() -> Config:
    return of(
        "openelm", ffn_dim_divisor=32, ffn_multipliers=[1.0, 2.0], num_kv_heads=[2, 2],
        num_query_heads=[4, 4], num_transformer_layers=2, share_input_output_layers=False,
    )  # fmt: skip


def _minicpm3() -> Config:
    factors = [1.0] * 8
    scaled = {
        "long_factor": factors, "original_max_position_embeddings": 32, "rope_type": "longrope",
        "short_factor": factors, "type": "longrope",
    }  # fmt: skip
    config = of("minicpm3", rope_scaling=scaled)
    del config["logits_scaling"]  # transformers derives it and refuses to have it set
    return config


def _minimax_m3() -> Config:
    # All layers are sparse; every second layer has experts.
    return of(
        "minimax_m3", layer_types=None, mlp_layer_types=["dense", "sparse"], sparse_attention_config=_SPARSE
    )


def _prism() -> Config:
    # One of its layers is packed.
    packed = {"block": 512, "dtype": "float16", "embedding": False, "path": "model.layers.0.mlp.down_proj"}
    text = of("qwen3_5_text", intermediate_size=512, num_experts=0, **_DELTA)
    return nesting("prism_hadamard_qwen35", text) | {
        "modules": [packed],
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "tensor_namespace": "mlx-vlm-qwen3_5",
    }


_OWN: dict[str, Config] = {
    "cohere2": of("cohere2", head_dim=16, tie_word_embeddings=True),
    "dbrx": _dbrx(),
    "deepseek_v2": of("deepseek_v2", rope_scaling={"factor": 2.0, "mscale_all_dim": 0.7, "type": "yarn"}),
    "exaone": of("exaone", head_dim=16),
    "gemma3": nesting("gemma3", of("gemma3_text", tie_word_embeddings=True)),
    "gemma3_text": of("gemma3_text", tie_word_embeddings=True),
    "gemma4": nesting("gemma4", _gemma4_text()),
    "gemma4_text": _gemma4_text(),
    "glm4_moe": of("glm4_moe", rope_scaling=None),
    "glm_moe_dsa": of("glm_moe_dsa", rope_parameters=_ROTATED),
    "hunyuan": of("hunyuan", rope_scaling={"alpha": 2.0, "factor": 1.0, "type": "dynamic"}),
    "kimi_k25": nesting("kimi_k25", of("deepseek_v3")),
    "kimi_k3": nesting("kimi_k3", of("kimi_linear", hidden_act="situ", **_DELTA_LAYERS)),
    "kimi_vl": nesting("kimi_vl", of("deepseek_v3")),
    "lfm2-vl": nesting("lfm2-vl", ZOO["lfm2"] | {"tie_word_embeddings": False}),
    "llama4_text": of("llama4_text", no_rope_layers=[1, 0], rope_scaling=None),
    "mellum": of("mellum", rope_parameters=_BY_LAYER),
    "mimo_v2_flash": _mimo_v2_flash(),
    "minicpm3": _minicpm3(),
    "lfm2_moe": of("lfm2_moe", conv_L_cache=3, layer_types=["conv", "full_attention"]),
    "minimax_m3_vl": nesting("minimax_m3_vl", _minimax_m3()),
    "ministral3": of("ministral3", rope_parameters=_SCALED),
    "mistral3": nesting("mistral3", of("ministral3", rope_parameters=_SCALED)),
    "mistral4": of("mistral4", rope_parameters=_SCALED),
    "muse_spark": _muse_spark(),
    "nemotron-nas": _nemotron_nas(),
    "olmo_hybrid": of("olmo_hybrid", layer_types=["linear_attention", "full_attention"]),
    "openelm": _openelm(),
    # Some of its token ids are unused; the model masks them.
    "phi3small": of(
        "phi3small", blocksparse_block_size=32, blocksparse_num_local_blocks=1, vocab_size=100352
    ),
    "pixtral": nesting("pixtral", of("llama", layer_types=None, sliding_window=None)),
    "prism_hadamard_qwen35": _prism(),
    "qwen3_5": nesting("qwen3_5", of("qwen3_5_text", num_experts=0, **_DELTA)),
    "qwen3_5_moe": nesting("qwen3_5_moe", of("qwen3_5_moe_text", **_DELTA)),
    "qwen3_vl_moe": nesting("qwen3_vl_moe", of("qwen3_moe")),
    "smollm3": of("smollm3", no_rope_layers=[1, 0]),
    "solar_open": of("solar_open", rope_scaling=None),
    "spark2_5": of("spark2_5", hidden_act="gelu", rope_parameters=_BY_LAYER),
}


def listed() -> list[str]:
    """Return every family of the installed mlx-lm: its modules with a class `Model`. Imports none of them."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    return sorted(file.stem for file in folder.glob("*.py") if "Model" in _bound(file))


def _bound(file: Path) -> set[str]:
    """Return the names of the classes in a module, defined or imported."""
    names = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
    return names


def is_family(name: str) -> bool:
    return name.startswith((PREFIX, THIRDS))


def of_mlx_vlm(name: str) -> bool:
    """Return whether the model's family exists only in mlx-vlm."""
    return is_family(name) and name.removeprefix(PREFIX) in whole_families.listed()


def config_of(name: str) -> Config:
    """Return the config of a family's model: the zoo's, its own, or the common one."""
    if name.startswith(THIRDS):
        return thirds(config_of(PREFIX + name.removeprefix(THIRDS)))
    family = name.removeprefix(PREFIX)
    if family in whole_families.listed():
        return whole_families.config_of(family)
    if family in _OWN:
        return _OWN[family]
    zoo = ZOO.get(family, {})
    return zoo if zoo.get("model_type") == family else of(family)
