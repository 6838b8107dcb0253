"""Tiny vision models with random weights in Hugging Face's format, one of each tested family.

Each has the files that upstream's loaders read: processor, special tokens, and a chat template that puts
images where the family's own template does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from tests.models import vision_configs as configs
from tests.models.arrays import named_parameters
from tests.models.configs import Config, generation_config
from tests.models.tokenizer import save_tokenizer, train_tokenizer
from tests.models.weights import SCALES, UNTIED, draw, loudness
from tests.models.whole_weights import new_whole

_SCALED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5"}
"""Text models whose output layer is tied to the embedding."""
_QWEN: Config = {"merge_size": 2, "temporal_patch_size": 2, "min_pixels": 32 * 32, "max_pixels": 96 * 96}


def _squares(kind: str, **more: Any) -> Config:
    size = {"height": configs.SIDE, "width": configs.SIDE}
    return {"image_processor_type": kind, "size": size, "do_resize": True} | more


def _tiles(kind: str) -> Config:
    side = configs.SIDE
    return {
        "image_processor_type": kind, "do_image_splitting": True,
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": 2 * side},
    }  # fmt: skip


def _parts(image: str, *, gap: str = "") -> str:
    """Return the template loop over a message's content that all families share."""
    return (
        "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
        "{%- for part in message.content -%}"
        f"{{%- if part.type == 'image' -%}}{{{{ '{image}{gap}' }}}}"
        "{%- elif part.type == 'video' -%}{{ raise_exception('no videos') }}"
        "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    )


def _turns(image: str, opening: str, closing: str, prompt: str, *, before: str = "", gap: str = "") -> str:
    loop = "{%- for message in messages -%}" + opening + _parts(image, gap=gap) + closing + "{%- endfor -%}"
    return before + loop + "{%- if add_generation_prompt -%}" + prompt + "{%- endif -%}"


_CHAT = ("{{ '<|im_start|>' + message.role + '\\n' }}", "{{ '<|im_end|>\\n' }}")
_IDEFICS = _turns(
    "<image>",
    "{{ message.role | capitalize + ': ' }}",
    "{{ '<end_of_utterance>\\n' }}",
    "{{ 'Assistant:' }}",
    before="{{ '<|im_start|>' }}",
)
# As SmolVLM's own, which reads only the parts of a message: content given as a string is lost.
_SMOLVLM = (
    "{{ '<|im_start|>' }}{%- for message in messages -%}{{ message.role | capitalize }}"
    "{{ ':' if message.content[0].type == 'image' else ': ' }}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}{{ '<image>' }}"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
    "{{ '<end_of_utterance>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
_IDEFICS_TOKENS = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)  # fmt: skip


@dataclass(frozen=True)
class Eyes:
    """A vision family. `tokens`: added to the tokenizer. `roles`: names of some of them in
    tokenizer_config.json. `template`: None means Qwen's. `files`: read by the processor."""

    config: Callable[[dict[str, int]], Config]
    files: Mapping[str, Config]
    tokens: tuple[str, ...] = ()
    template: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)


EYES: dict[str, Eyes] = {
    "qwen3_5-eyes": Eyes(configs.qwen3_5, {"preprocessor_config.json": _QWEN | {"patch_size": 16}}),
    "qwen3_vl-eyes": Eyes(configs.qwen3_vl, {"preprocessor_config.json": _QWEN | {"patch_size": 16}}),
    "qwen2_5_vl-eyes": Eyes(configs.qwen2_5_vl, {"preprocessor_config.json": _QWEN | {"patch_size": 14}}),
    "gemma3-eyes": Eyes(
        configs.gemma3,
        {
            "preprocessor_config.json": _squares("Gemma3ImageProcessor"),
            "processor_config.json": {"image_seq_length": 4},
        },
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        _turns("<start_of_image>", *_CHAT, "{{ '<|im_start|>assistant\\n' }}"),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4-eyes": Eyes(
        configs.gemma4,
        {
            "processor_config.json": {
                "feature_extractor": {"feature_size": 16},
                "image_processor": {"max_soft_tokens": 16, "patch_size": 16, "pooling_kernel_size": 2},
            }
        },
        ("<|image>", "<image|>", "<|image|>", "<|audio|>"),
        _turns("<|image|>", *_CHAT, "{{ '<|im_start|>assistant\\n' }}"),
        {
            "audio_token": "<|audio|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
    ),
    "mistral3-eyes": Eyes(
        configs.mistral3,
        {
            "preprocessor_config.json": {"size": {"longest_edge": 112}, "patch_size": 14},
            "processor_config.json": {"image_token": "[IMG]", "patch_size": 14, "spatial_merge_size": 2},
        },
        ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        _turns(
            "[IMG]",
            "{%- if message.role == 'user' -%}{{ '[INST]' }}{%- endif -%}",
            "{{ '[/INST]' if message.role == 'user' else '<|im_end|>' }}",
            "",
        ),
    ),
    "llava-eyes": Eyes(
        configs.llava,
        {
            "preprocessor_config.json": _squares("CLIPImageProcessor", do_center_crop=False),
            "processor_config.json": {
                "num_additional_image_tokens": 1, "patch_size": 14,
                "vision_feature_select_strategy": "default",
            },
        },
        ("<image>",),
        _turns(
            "<image>", "{{ message.role | upper + ': ' }}", "{{ '\\n' }}", "{{ 'ASSISTANT:' }}", gap="\\n"
        ),
    ),
    "idefics3-eyes": Eyes(
        configs.idefics3,
        {
            "preprocessor_config.json": _tiles("Idefics3ImageProcessor"),
            "processor_config.json": {"image_seq_len": 4},
        },
        _IDEFICS_TOKENS, _IDEFICS,
    ),
    "smolvlm-eyes": Eyes(
        configs.smolvlm,
        {
            "preprocessor_config.json": _tiles("SmolVLMImageProcessor"),
            "processor_config.json": {"image_seq_len": 4},
        },
        _IDEFICS_TOKENS, _SMOLVLM,
    ),
    "internvl-eyes": Eyes(
        configs.internvl,
        {"processor_config.json": {"image_seq_length": 4}},
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        _turns("<IMG_CONTEXT>", *_CHAT, "{{ '<|im_start|>assistant\\n' }}", gap="\\n"),
    ),
}  # fmt: skip


def make_eyes(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model called `name`, with `changes` to its config.json, into `folder`, made if absent."""
    family = EYES[name]
    tokenizer = train_tokenizer(normalize=name == "qwen3_5-eyes")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.tokens])
    ids = tokenizer.get_vocab()
    config = family.config(ids) | changes
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(family, tokenizer, folder)
    for file, content in family.files.items():
        _write_json(folder / file, content)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(ids))
    weights = _draw_weights(config, tokenizer, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _save_tokenizer(family: Eyes, tokenizer: Tokenizer, folder: Path) -> None:
    save_tokenizer(tokenizer, folder, configs.CONTEXT_TOKENS)
    if family.template is not None:
        (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text())
    for token in family.tokens:
        described = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        told["added_tokens_decoder"][str(tokenizer.token_to_id(token))] = described | {
            "content": token, "special": True,
        }  # fmt: skip
    # A list of additional special tokens would replace the tokens that have roles.
    del told["additional_special_tokens"]
    _write_json(file, told | {"extra_special_tokens": dict(family.roles)})


def _draw_weights(config: Config, tokenizer: Tokenizer, seed: int) -> dict[str, mx.array]:
    """Return every parameter by name, float32. Deterministic in `seed`."""
    shapes = {name: array.shape for name, array in named_parameters(new_whole(config))}
    tied = config["tie_word_embeddings"]
    if tied:
        shapes.pop("language_model.lm_head.weight", None)
    scales = SCALES[_SCALED[config["model_type"]]] if tied else UNTIED
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(seed), len(shapes))
        drawn = {
            name: _draw(name, shapes[name], key, scales)
            for name, key in zip(sorted(shapes), keys, strict=True)
        }
        ending = "embed_tokens.weight" if tied else "lm_head.weight"
        output = next(name for name in shapes if name.endswith(ending))
        drawn[output] *= mx.array(loudness(tokenizer, drawn[output].shape[0]))[:, None]
        mx.eval(drawn)
    return drawn


def _draw(name: str, shape: tuple[int, ...], key: mx.array, scales: Any) -> mx.array:
    if name.startswith("language_model.") and len(shape) < 4:
        return draw(name, shape, key, scales)
    uniform = 2.0 * mx.random.uniform(shape=shape, key=key) - 1.0
    if len(shape) == 1:
        is_added = name.endswith("bias") or "embed" in name
        return (0.0 if is_added else 1.0) + 0.2 * uniform
    if "position" in name or "cls_token" in name or "class_embedding" in name:
        return uniform
    return uniform * 1.5 * math.sqrt(3.0 / math.prod(shape[1:]))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
