"""Sizes of a tiny model's parts beside its language model, under all the names that mlx-vlm's families
use."""

from __future__ import annotations

from tests.models.configs import Config
from tests.models.family_sizes import COMMON, WIDTH

SIDE = 32
"""Width of the towers."""

TOWER: Config = {
    **dict.fromkeys(("hidden_size", "embed_dim", "embedding_dim", "width", "projection_dim"), SIDE),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 2 * SIDE),
    **dict.fromkeys(("depth", "layers", "num_layers", "num_hidden_layers", "encoder_layers"), 2),
    **dict.fromkeys(("heads", "num_heads", "num_attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), 3),
    **dict.fromkeys(("out_hidden_size", "output_dim", "text_hidden_size", "d_model"), WIDTH),
    "head_dim": 16, "image_size": 56, "num_query_groups": 1, "layer_norm_eps": 1e-6, "mlp_ratio": 2.0,
    "num_position_embeddings": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "vocab_size": 64,
}  # fmt: skip


def flat(family: str, **values: object) -> Config:
    """Return the config of a family that has only a language model."""
    return COMMON | {"model_type": family} | values


def seeing(family: str, tower: str | None = None, **text: object) -> Config:
    """Return the config of a family with a tower of type `tower` beside its language model."""
    own = COMMON | {"model_type": family} | text
    ends = {key: own[key] for key in ("dtype", "tie_word_embeddings", "vocab_size", "hidden_size")}
    return ends | {
        "model_type": family, "text_config": own,
        "vision_config": TOWER | {"model_type": tower or family},
    }  # fmt: skip


def beside(family: str, tower: str | None = None) -> Config:
    """The same with the language model's config at the top level, not nested."""
    return flat(family) | {"vision_config": TOWER | {"model_type": tower or family}}
