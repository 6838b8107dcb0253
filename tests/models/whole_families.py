"""Tiny configs for every family that only mlx-vlm has, or the reason why its models generate no text."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from protocol.task_detection import ENCODERS
from tests.models.configs import VOCABULARY, Config
from tests.models.family_sizes import COMMON, WIDTH
from tests.models.whole_sizes import SIDE, TOWER, beside, flat, seeing

_IMAGES = "it makes images"
_SEES = "it finds what is in an image, and writes nothing"
_NUMBERS = "it answers with numbers"
_DECIDES = "it chooses among answers that it is given"
_DIFFUSION = "it writes by diffusion"
_ENCODED = "a decoder of its own answers what an encoder has made of an image"
_CUT = "all of a prompt sees all of it, whereas long ones are run in parts"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("bonsai", "ernie_image", "flux2", "flux3", "ideogram4", "llada_image"), _IMAGES),
    **dict.fromkeys(("mage_flow", "ming_image", "moss_image", "qwen_image", "z_image"), _IMAGES),
    **dict.fromkeys(("moge3", "pp_doclayout_v3", "rfdetr", "rt_detr_v2", "sam3", "sam3_1"), _SEES),
    **dict.fromkeys(("sam3d_body", "sam3d_objects", "sapiens2", "video_depth_anything", "yolo11"), _SEES),
    **dict.fromkeys(
        ("colidefics3", "colqwen2_5", "dinov2", "embedding_gemma2", "gemma3_embedding"), _NUMBERS
    ),
    **dict.fromkeys(
        ("gliner2_5", "lfm2_colbert", "lfm2_embedding", "lfm2_encoder", "llama_bidirec"), _NUMBERS
    ),
    **dict.fromkeys(
        ("llama_nemotron_vl_embedding", "ministral3_embedding", "openai_privacy_filter"), _NUMBERS
    ),
    **dict.fromkeys(("qwen3_embedding", "qwen3_vl_embedding", "siglip"), _NUMBERS),
    **dict.fromkeys(("clef", "d1", "d1_omni", "decider2", "laya"), _DECIDES),
    **dict.fromkeys(("diffusion_gemma", "llada2_moe"), _DIFFUSION),
    **dict.fromkeys(("florence2", "nemotron_parse"), _ENCODED),
    **dict.fromkeys(("falcon_perception", "paligemma"), _CUT),
    "deepseek_v4": "what it keeps of a prompt, pooled, depends on where that is cut",
    "hy_v4": "upstream keeps where it parts the keys of one length for those of all others",
    "minimax_h3": "it makes videos",
    "unlimited_ocr": "upstream writes answers into a ring that begins with the first step of one token",
    "zaya1_vl": "upstream's own steps call its language model by a name that it does not have",
    "nemotron_voicechat": "it talks, by a package that is not a dependency",
}
"""Families that the loader must refuse with an explanatory sentence, and the reason."""

_MROPE: Config = {
    "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default",
    "type": "default",
}  # fmt: skip
_SPARSE: Config = {
    "sparse_attention_freq": [1, 1], "sparse_block_size": 8, "sparse_index_dim": 32,
    "sparse_num_index_heads": 2, "sparse_topk_blocks": 3, "use_sparse_attention": True,
}  # fmt: skip
_MAMBA: Config = {
    "chunk_size": 8, "hybrid_override_pattern": "M*M*", "mamba_head_dim": 32, "mamba_hidden_act": "silu",
    "mamba_num_heads": 4, "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "n_groups": 1,
    "num_hidden_layers": 4, "ssm_state_size": 32, "time_step_limit": [0.0, 100.0], "use_conv_bias": True,
}  # fmt: skip
_WINDOWS: Config = {
    "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "swa_head_dim": 32,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_v_head_dim": 32,
}  # fmt: skip
_DELTA: Config = {"full_attention_interval": 2, "layer_types": None, "tie_word_embeddings": True}
_SEEING_DELTA: Config = {"num_experts": 0, "rope_parameters": _MROPE, **_DELTA}
_PROJECTOR: Config = {"input_dim": SIDE, "n_embed": WIDTH, "projector_type": "linear"}
_ALIGNER: Config = {
    "cls": "MlpProjector", "model_type": "aligner",
    "params": {"depth": 2, "input_dim": SIDE, "n_embed": WIDTH, "projector_type": "mlp_gelu"},
}  # fmt: skip
_RESAMPLER: Config = {
    "model_type": "idefics2", "num_key_value_heads": 1, "resampler_depth": 1, "resampler_head_dim": 16,
    "resampler_n_heads": 2, "resampler_n_latents": 4,
}  # fmt: skip
_POINTS: Config = {
    "head_dim": 16, "hidden_size": SIDE, "intermediate_size": 2 * SIDE, "num_attention_heads": 2,
    "num_key_value_heads": 2, "text_hidden_size": WIDTH, "vit_layers": [-1],
}  # fmt: skip
_XD_ROPE: Config = {"alpha": 1000.0, "factor": 1.0, "type": "xdrope", "xdrope_section": [4, 4, 4, 4]}
_SIGLIP = "siglip_vision_model"


_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "vocab_size",
)  # fmt: skip
"""The only size keys that some classes accept."""


def _glm_ocr() -> Config:
    # Its class accepts no other keys.
    whole = seeing("glm_ocr", "glm_ocr_vision")
    text = {key: COMMON[key] for key in ("head_dim", "max_position_embeddings", *_SIZES)}
    tower = {"depth": 2, "hidden_size": SIDE, "image_size": 56, "intermediate_size": 2 * SIDE, "num_heads": 2}
    return whole | {
        "text_config": text | {"rope_parameters": _MROPE},
        "vision_config": tower | {"out_hidden_size": WIDTH},
    }


def _phi4_siglip() -> Config:
    tower = {"hidden_size": SIDE, "intermediate_size": 2 * SIDE, "num_attention_heads": 2}
    text = {key: COMMON[key] for key in _SIZES} | {"partial_rotary_factor": 1.0}
    whole = {"mm_hidden_size": SIDE, "text_config": text, "vision_config": tower | {"num_hidden_layers": 2}}
    return beside("phi4_siglip") | text | whole


def _qwen3_omni_moe() -> Config:
    thinker = seeing("qwen3_omni_moe", rope_scaling=_MROPE)
    audio = {
        "d_model": SIDE, "downsample_hidden_size": 16, "encoder_attention_heads": 2,
        "encoder_ffn_dim": SIDE, "encoder_layers": 1, "num_hidden_layers": 1, "num_mel_bins": 16,
        "output_dim": WIDTH,
    }  # fmt: skip
    tower = thinker["vision_config"] | {
        "deepstack_visual_indexes": [0], "model_type": "qwen3_omni_moe_vision_encoder",
    }  # fmt: skip
    speaking = {"text_config": thinker["text_config"], "code_predictor_config": {"num_hidden_layers": 1}}
    return {
        **thinker, "enable_audio_output": False,
        "code2wav_config": {},
        "talker_config": speaking,
        "thinker_config": thinker | {"audio_config": audio, "vision_config": tower},
    }  # fmt: skip


_OWN: dict[str, Config] = {
    **{
        family: flat(family)
        for family in (
            "cohere2_moe", "flint", "hy_v4", "k2_horizon", "kolibri1", "llada2_moe", "longcat_flash_sparse",
            "nemotron_labs_diffusion", "xing4_0",
        )
    },
    **{family: seeing(family, _SIGLIP, **_SEEING_DELTA) for family in ("minicpmv4_6", "minicpmv4_7")},
    **{
        family: seeing(family, "vision") | {"projector_config": _PROJECTOR}
        for family in ("deepseek_vl_v2", "deepseekocr", "unlimited_ocr")
    },
    "aya_vision": seeing("aya_vision", _SIGLIP, head_dim=16),
    "cohere_compass": seeing("cohere_compass", "cohere_compass_vision"),
    "deepseek_v4": flat(
        "deepseek_v4", compress_ratios=[0, 4], layer_types=None, num_hash_layers=0, num_key_value_heads=1,
        o_groups=2, o_lora_rank=32,
    ),
    "diffusion_gemma": seeing("diffusion_gemma"),
    "nemotron_parse": seeing("nemotron_parse"),
    "colidefics3": seeing("colidefics3", "idefics3"),
    "colqwen2_5": beside("colqwen2_5", "qwen2_5_vl") | {"rope_scaling": _MROPE | {"type": "mrope"}},
    "deepseekocr_2": seeing("deepseekocr_2", "vision")
    | {"projector_config": _PROJECTOR, "vision_config": {"model_type": "vision", "width": {}}},
    "ernie4_5_moe_vl": beside("ernie4_5_moe_vl")
    | {
        "moe_intermediate_size": [WIDTH, WIDTH], "moe_layer_start_index": 0, "moe_num_experts": [4, 4],
        "rope_scaling": _MROPE | {"mrope_section": [3, 3, 2]},
    },
    "falcon_ocr": beside("falcon_ocr"),
    "falcon_perception": beside("falcon_perception") | {"do_segmentation": False},
    "florence2": seeing("florence2") | {"vision_config": {"model_type": "davit"}},
    "glm4v": seeing("glm4v", eos_token_id=[1], rope_scaling=_MROPE),
    "glm4v_moe": seeing("glm4v_moe", rope_scaling=_MROPE),
    "glm5_next": seeing(
        "glm5_next", index_kpool=4, indexer_types=None, layer_types=["linear_attention", "full_attention"],
        linear_head_dim=32, linear_num_heads=2, num_key_value_heads=4, qk_rope_head_dim=0,
    ),
    "glm_ocr": _glm_ocr(),
    "got": beside("got"),
    "granite4_vision": seeing("granite4_vision", _SIGLIP)
    | {"vision_config": TOWER | {"hidden_size": WIDTH, "num_attention_heads": 1}},
    "hrm_text": flat("hrm_text", layer_types=None),
    "hunyuan_vl": seeing("hunyuan_vl", rope_scaling=_XD_ROPE),
    "idefics2": seeing("idefics2") | {"perceiver_config": _RESAMPLER},
    "indic_ocr": seeing("indic_ocr", "qwen3_5", **_SEEING_DELTA),
    "internvl_chat": seeing("internvl_chat", _SIGLIP),
    "limite": flat(
        "limite",
        softcap_logits={"a": 30.0, "b": 0.0, "c": 8.0, "kind": "sigmoid"},
        attn_gate_channels=16, head_dim=16, rope_n_pairs=8, tie_word_embeddings=True, ve_dim=16,
        global_layers=[1], ve_layers=[0, 1],
    ),
    "llava_bunny": beside("llava_bunny", _SIGLIP) | {"auto_map": {}, "mm_hidden_size": SIDE},
    "llava_next": seeing("llava_next", "clip_vision_model", model_type="llama"),
    "llmjpvl": seeing("llmjpvl", _SIGLIP, model_type="llama"),
    "locateanything": seeing("locateanything", "moonvit", tie_word_embeddings=True),
    "mage_vl": seeing("mage_vl") | {"vision_config": TOWER | {"num_attention_heads": 1}},
    "mimo_v2": seeing("mimo_v2", **_WINDOWS)
    | {
        "audio_config": {
            "input_local_dim": SIDE, "input_local_head_dim": 16, "input_local_attn_heads": 2,
            "input_local_intermediate_size": SIDE, "input_local_layers": 1, "out_hidden_size": WIDTH,
        }
    },
    "minimax_m3": flat(
        "minimax_m3", layer_types=None, moe_layer_freq=[0, 1], sparse_attention_config=_SPARSE
    ),
    "mistral_large3": seeing("mistral_large3", "pixtral"),
    "molmo": seeing("molmo", embedding_size=VOCABULARY, mlp_hidden_size=128),
    "molmo2": seeing("molmo2") | {"vision_config": {}},
    "molmo_point": seeing("molmo_point") | {"adapter_config": _POINTS},
    "moondream3": seeing("moondream3", num_key_value_heads=4, prefix_attn=0, moe_start_layer=1),
    "multi_modality": seeing("multi_modality", "vision", model_type="llama")
    | {
        "projector_config": _ALIGNER,
        "vision_config": TOWER | {"cls": "CLIPVisionTower", "model_type": "vision", "params": {}},
    },
    "nemotron_h_nano_omni": seeing("nemotron_h_nano_omni", **_MAMBA),
    "paddleocr_vl": beside("paddleocr_vl") | {"rope_scaling": _MROPE, "rope_parameters": _MROPE},
    "paligemma": seeing("paligemma", _SIGLIP, model_type="gemma"),
    "phi3_v": beside("phi3_v"),
    "phi4_siglip": _phi4_siglip(),
    "phi4mm": beside("phi4mm"),
    "plamo2vl": seeing("plamo2vl", _SIGLIP, model_type="plamo2"),
    "qwen3_5_moe_text": flat("qwen3_5_moe_text", **_DELTA),
    "qwen3_5_text": flat("qwen3_5_text", num_experts=0, **_DELTA),
    "qwen3_omni_moe": _qwen3_omni_moe(),
    "qwen4_exp": seeing(
        "qwen4_exp", hc_lowrank=16, indexer_budget=24, indexer_compress_ratio=4, indexer_head_dim=32,
        indexer_kv_heads=1, indexer_n_heads=2,
        **_SEEING_DELTA | {"num_experts": 4},
    ),
    "qwen3_vl_embedding": seeing("qwen3_vl_embedding", "qwen3_vl", rope_scaling=_MROPE),
    "smolvlm": seeing("smolvlm", "smolvlm_vision"),
    "youtu_vl": beside("youtu_vl"),
    "z1t": flat("z1t"),
    "zaya1_vl": beside("zaya1_vl", "qwen2_5_vl") | {"zaya_mlp_expansion": 16},
}  # fmt: skip


@cache
def listed() -> tuple[str, ...]:
    """Return every family of the installed mlx-vlm that mlx-lm has under no name, except embedding encoders.
    Imports none of them."""
    from mlx_lm.utils import MODEL_REMAPPING as TO_MLX_LM
    from mlx_vlm.utils import MODEL_REMAPPING as TO_MLX_VLM

    theirs = {file.stem.lower() for file in _folder("mlx_lm").glob("*.py")}
    known = theirs | set(TO_MLX_LM) | ENCODERS
    names = {file.parent.name for file in _folder("mlx_vlm").glob("*/__init__.py")}
    twice = {family for alias, family in TO_MLX_VLM.items() if alias in known}
    return tuple(sorted(names - twice - known - {name.replace("-", "_") for name in known}))


def _folder(package: str) -> Path:
    """Return the folder of the package's models."""
    spec = importlib.util.find_spec(f"{package}.models")
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ())))


def is_made(family: str) -> bool:
    """Return whether a test model is made for `family`. For most refused families the name is enough."""
    return family in _OWN or family not in REFUSED


def config_of(family: str) -> Config:
    """Return the config of a family's model: its own, or the common one."""
    return _OWN.get(family) or seeing(family)
