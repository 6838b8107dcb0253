"""Tiny random-weight models in Hugging Face's folder format, for upstream's real loaders.

    python -m tests.models.make hybrid /tmp/hybrid --seed 0

The same name, seed and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.models.configs import CONFIGS, Config, context_tokens, generation_config
from tests.models.encoders import ENCODERS, make_encoder
from tests.models.families import config_of, is_family, of_mlx_vlm
from tests.models.mtp_models import HEADS, UNTIED, make_heads, make_untied
from tests.models.tokenizer import END_OF_TURN, PADDING, save_tokenizer, train_tokenizer
from tests.models.vision_models import EYES, make_eyes
from tests.models.weights import draw_weights, quantized
from tests.models.whole_weights import shapes_of
from tests.models.zoo import ZOO

NAMES = tuple(CONFIGS)
"""The three models that most tests use."""


def make_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the model called `name` into `folder`, made if absent, and return `folder`.

    `dense` is Qwen3, `hybrid` Qwen3.5 (text), `sliding` Gemma 3 (text). The zoo has one for each other kind
    of cache, `families` one for each family. Those of `encoders` embed or rerank, those of `eyes` accept
    images. `hybrid_heads` and `hybrid_heads_untied` have MTP layers. All are float32 (or quantized)
    and, except for one family, under 8 MB. Raises ValueError for an unknown name.
    """
    if name in ENCODERS:
        return make_encoder(name, folder, seed)
    if name in EYES:
        return make_eyes(name, folder, seed)
    if name == HEADS:
        return make_heads(folder)
    if name == UNTIED:
        return make_untied(folder)
    if name not in NAMES and name not in ZOO and not is_family(name):
        raise ValueError(f"unknown model {name!r}; available: {', '.join((*NAMES, *ZOO))}")
    # transformers encodes every Qwen3.5 prompt in NFC whatever tokenizer.json says, so tokenizer.json says
    # NFC.
    tokenizer = train_tokenizer(normalize=name == "hybrid")
    ids = tokenizer.get_vocab()
    config = _config(name, ids)
    shapes, others = shapes_of(config) if of_mlx_vlm(name) else (None, {})
    weights = draw_weights(config, tokenizer, seed, shapes)
    weights |= {other: mx.zeros(shape, mx.uint8) for other, shape in others.items()}
    if "quantization" in config:
        weights = quantized(config, weights)

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder, context_tokens(config))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(ids))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _config(name: str, ids: dict[str, int]) -> Config:
    if name in CONFIGS:
        return CONFIGS[name](ids)
    config = ZOO[name] if name in ZOO else config_of(name)
    return config | {"eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[PADDING]}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight model.")
    parser.add_argument("name", choices=(*NAMES, *ZOO, *ENCODERS, *EYES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.name, arguments.folder, arguments.seed))


if __name__ == "__main__":
    _main()
