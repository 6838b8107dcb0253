"""Tiny EAGLE-3, DFlash and DSpark drafters for the tiny models, some of whose draft tokens are accepted.

Two are trained briefly on the target model's greedy output, the others are random.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Adam
from mlx_lm.utils import load_model
from mlx_vlm.utils import get_model_and_args

from tests.models.arrays import named_parameters
from tests.models.fixtures import model_folder
from tests.models.mtp_models import PROMPTS, answer_of

TARGETS = ("dense", "hybrid")
KINDS = ("eagle3", "eagle3_whole", "dflash", "dflash_sliding", "dflash2", "dspark")
DRAFTERS = tuple(f"{target}_{kind}" for target in TARGETS for kind in KINDS)
TRAINED = {"dense_eagle3": 20, "dense_dflash": 40}
"""Training steps per trained drafter: no test makes one for longer than a second."""
BLOCK = 8
WINDOW = 12
_MASK = 2040
_RATE = 5e-3
_OWN_TOKENS = 640
"""Vocabulary size of an EAGLE-3 drafter whose vocabulary is smaller than its target's."""


def make_drafter(name: str, folder: Path) -> Path:
    """Write the drafter called `name`, `{target}_{kind}`, into `folder`, made if absent."""
    target, kind = name.split("_", 1)
    network, _ = load_model(model_folder(target))
    return write_drafter(kind, folder, network, _said(network), TRAINED.get(name, 0))


def write_drafter(kind: str, folder: Path, network: Any, said: mx.array, steps: int) -> Path:
    """Write a drafter for `network` into `folder`, trained for `steps` steps on the tokens `said`, [texts,
    tokens]."""
    config = _config(kind, inner_of(network))
    mx.random.seed(11)
    family, _ = get_model_and_args(config)
    module = family.Model(family.ModelConfig.from_dict(config))
    if "d2t" in module:
        module.d2t = mx.array(_own_tokens(said), mx.int32) - mx.arange(_OWN_TOKENS)
    own = {name for name, _ in named_parameters(module)}
    _train(kind, module, network, said, steps)
    weights = {name: each for name, each in named_parameters(module) if name in own}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def inner_of(network: Any) -> Any:
    """Return the submodule that contains the layers."""
    return getattr(network, "language_model", network).model


def hidden_of(network: Any, tokens: mx.array, numbers: Sequence[int]) -> mx.array:
    """Return the concatenated outputs of the layers `numbers`, [rows, tokens, sum of widths], for `tokens`,
    [rows, tokens]."""
    layers, heard = inner_of(network).layers, dict[int, mx.array]()
    own = list(layers)

    def listening(number: int) -> nn.Module:
        class Listening(nn.Module):
            def __call__(self, *given: Any, **named: Any) -> mx.array:
                found: mx.array = own[number](*given, **named)
                heard[number] = found
                return found

            def __getattr__(self, key: str) -> Any:
                return getattr(own[number], key)

        return Listening()

    layers[:] = [listening(number) for number in range(len(own))]
    network(tokens)
    layers[:] = own
    return mx.concatenate([heard[number] for number in numbers], axis=-1)


def _said(network: Any) -> mx.array:
    """Return the prompts followed by the model's greedy output, [prompts, tokens]."""
    return mx.array([answer_of(network, prompt) for prompt in PROMPTS[:2]], mx.uint32)


def _own_tokens(said: mx.array) -> list[int]:
    flat: Any = said.flatten().tolist()
    seen = dict(Counter(flat).most_common(_OWN_TOKENS))
    return sorted([*seen, *(token for token in range(2048) if token not in seen)][:_OWN_TOKENS])


def _config(kind: str, inner: Any) -> dict[str, Any]:
    depth, width = len(inner.layers), inner.embed_tokens.weight.shape[1]
    layer = {
        "hidden_size": width,
        "intermediate_size": 3 * width // 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }
    if kind.startswith("eagle3"):
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 2048 if kind == "eagle3_whole" else _OWN_TOKENS,
            "eagle_aux_hidden_state_layer_ids": [1, depth // 2, depth],
            "norm_before_residual": kind == "eagle3_whole",
            "transformer_layer_config": layer | {"num_hidden_layers": 2 if kind == "eagle3_whole" else 1},
        }
    block = {"mask_token_id": _MASK, "target_layer_ids": sorted({0, depth - 1})}
    common = layer | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": depth,
        "block_size": BLOCK,
    }
    match kind:
        case "dflash_sliding":
            layers = ["sliding_attention", "full_attention"]
            return common | {
                "dflash_config": block | {"causal": True},
                "layer_types": layers,
                "sliding_window": WINDOW,
            }
        case "dflash2":
            sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
            return common | {"architectures": ["DFlash2DraftModel"], "dflash_config": block | sizes}
        case "dspark":
            markov: dict[str, Any] = {"projector_type": "dspark", "markov_rank": 8}
            return common | {"architectures": ["DSparkDraftModel"], "dflash_config": block | markov}
        case _:
            return common | {"dflash_config": block}


def _train(kind: str, module: Any, network: Any, said: mx.array, steps: int) -> None:
    if not steps:
        return
    lesson = _eagle_lesson if kind.startswith("eagle3") else _block_lesson
    loss = lesson(module, network, said)
    optimizer = Adam(_RATE)
    graded = nn.value_and_grad(module, loss)
    for step in range(steps):
        _, grades = graded(step)
        optimizer.update(module, grades)
        mx.eval(module.parameters(), optimizer.state)


def _eagle_lesson(module: Any, network: Any, said: mx.array) -> Callable[[int], mx.array]:
    hidden = hidden_of(network, said, module.config.capture_layer_ids)
    own: Any = (module.d2t + mx.arange(_OWN_TOKENS)).tolist()
    places = {token: place for place, token in enumerate(own)}
    rows: Any = said.tolist()
    wanted = mx.array([[places.get(token, 0) for token in row] for row in rows])
    module.freeze(keys=["d2t"])
    mx.eval(hidden)

    def loss(step: int) -> mx.array:
        """Loss on the next token, and on the one after it from the drafter's own hidden states."""
        module._cache, module._next_position = [], 1
        first = module._forward_tokens(said[:, 1:-1], hidden[:, :-2], mx.uint32)
        module._next_position = 2
        second = module._forward_tokens(said[:, 2:-1], first[:, :-1], mx.uint32)
        return _missed(module._logits(first), wanted[:, 2:]) + _missed(module._logits(second), wanted[:, 3:])

    return loss


def _block_lesson(module: Any, network: Any, said: mx.array) -> Callable[[int], mx.array]:
    module.bind(network)
    module.embed_tokens.freeze()
    if isinstance(module.lm_head, nn.Module):
        module.lm_head.freeze()
    hidden = hidden_of(network, said, module.config.target_layer_ids)
    rows, length = said.shape
    mx.eval(hidden)

    def loss(step: int) -> mx.array:
        """Loss on the block after a prefix whose length varies with `step`."""
        known = 12 + 7 * step % (length - BLOCK - 12)  # 7 and the modulus are coprime
        masks = mx.full((rows, BLOCK - 1), _MASK, mx.uint32)
        block = mx.concatenate([said[:, known : known + 1], masks], axis=1)
        module._fused_context_kv_weight = None
        logits = module(block, hidden[:, :known], module.make_cache())
        return _missed(logits[:, 1:], said[:, known + 1 : known + BLOCK])

    return loss


def _missed(logits: mx.array, wanted: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, wanted, reduction="mean")
