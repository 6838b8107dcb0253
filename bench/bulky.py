"""A model that is large on disk but cheap to run: random experts, two of them active per token.

As with the models that people serve, loading it is mostly reading from disk.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.models.fixtures import model_folder

HIDDEN = 512
EXPERT = 1024
LAYERS = 8
EXPERT_BYTES = 3 * HIDDEN * EXPERT * 4
"""Bytes of one expert, three matrices in float32, the only dtype in which MLX runs experts on a CPU."""


def write_bulky(folder: Path, gigabytes: float) -> Path:
    """Write a Qwen3-MoE of about `gigabytes` of random float32 weights, with the tests' tokenizer."""
    # Imported here, so that the measuring process does not load MLX.
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3_moe import Model, ModelArgs
    from mlx_lm.utils import save_model

    source = model_folder("dense")
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": EXPERT,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": LAYERS,
        "num_experts": max(2, round(gigabytes * 1e9 / (LAYERS * EXPERT_BYTES))),
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    model = Model(ModelArgs.from_dict(config))
    mx.eval([array for _, array in tree_flatten(model.parameters())])
    save_model(folder, model)
    return folder
