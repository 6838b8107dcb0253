"""Drafters that were trained for one model, as mlx-vlm builds and loads them: EAGLE-3, DFlash and its kin,
and layers for multi-token prediction in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from worker.contract import ModelError
from worker.models.drafting import DraftModel
from worker.models.heads import open_prediction
from worker.models.listening import bytes_of_arrays, layers_of, model_of, run_through, tap_layers

if TYPE_CHECKING:
    from worker.engine.heads import Heads
    from worker.engine.hearing import Taps

_EAGLE_LAYERS = 3
"""An EAGLE-3 listens to so many."""
_UPSTREAM_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, ImportError)
"""Of a folder that is not what it says."""


def load_trained(found: DraftModel, network: Any) -> Heads:
    """`network`: of the model that it drafts for, some of whose layers are listened to from now on. Raises
    `ModelError`."""
    from mlx_vlm.speculative.drafters import DFlashDraftModel
    from mlx_vlm.speculative.drafters.eagle3.eagle3 import Eagle3DraftModel
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    module = _opened(found)
    match module:
        case Eagle3DraftModel():
            heads = _eagle(found.name, module, network)
        case DFlashDraftModel() if _attends_plainly(module):
            heads = _blocks(found, module, network)
        case Qwen3_5MTPDraftModel():
            heads = _prediction(found.name, module, network)
        case _:
            raise ModelError(
                f"{found.name}: drafters of this kind ({type(module).__name__}) are not run; those of "
                "EAGLE-3 and DFlash are."
            )
    _warm_up(heads, network)
    return heads


def _opened(found: DraftModel) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter

    if _config_of(found).get("model_file"):
        raise ModelError(
            f"{found.name}: its config.json asks for code of its own to be run, which is never done."
        )
    try:
        return load_drafter(str(found.folder))[0]
    except _UPSTREAM_ERRORS as error:
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"mlx-vlm cannot load the draft model {found.name} ({told}).") from None


def _config_of(found: DraftModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((found.folder / "config.json").read_bytes())
    return config


def _attends_plainly(module: Any) -> bool:
    """Its layers have the attention that ours stands in for."""
    from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention

    return all(type(layer.self_attn) is DFlashAttention for layer in module.layers)


def _eagle(name: str, module: Any, network: Any) -> Heads:
    from worker.engine.heads import Heads
    from worker.engine.predicting import Eagle

    config = module.config
    numbers = list(config.capture_layer_ids)
    if len(numbers) != _EAGLE_LAYERS:
        raise ModelError(
            f"{name}: it listens to {len(numbers)} layers, where an EAGLE-3 does to {_EAGLE_LAYERS}."
        )
    _require_vocabulary(name, module.target_vocab_size, network)
    _require_tokens(name, module, network)
    taps = _taps(name, network, numbers, module.target_hidden_size)
    share = bytes_of_arrays(module) / bytes_of_arrays(network)
    return Heads(Eagle(module, model_of(network)), taps, share)


def _blocks(found: DraftModel, module: Any, network: Any) -> Heads:
    from worker.engine.blocks import Blocks
    from worker.engine.heads import Heads

    name, config = found.name, module.config
    _require_vocabulary(name, config.vocab_size, network)
    told = _config_of(found)
    _require_depth(name, (told | (told.get("dflash_config") or {})).get("num_target_layers"), network)
    taps = _taps(name, network, list(config.target_layer_ids), config.hidden_size)
    try:
        blocks = Blocks(module, model_of(network))
    except AttributeError:
        raise ModelError(f"{name}: it needs the model's embedding, which is not found.") from None
    # What it has of the model's own, an output layer for one, counts here.
    share = bytes_of_arrays(module) / bytes_of_arrays(network)
    return Heads(blocks, taps, share)


def _prediction(name: str, module: Any, network: Any) -> Heads:
    heads = open_prediction(module, network) if layers_of(network) is not None else None
    if heads is None:
        raise _deaf(name)
    return heads


def _require_vocabulary(name: str, tokens: int, network: Any) -> None:
    known = run_through(network).shape[-1]
    if tokens != known:
        raise ModelError(
            f"the draft model {name} knows {tokens} tokens, its model {known}: it was trained for another "
            "one."
        )


def _require_tokens(name: str, module: Any, network: Any) -> None:
    """A vocabulary of its own is a part of the model's."""
    if module.d2t is None:
        return
    numbers = mx.arange(module.draft_vocab_size) + module.d2t
    if not mx.all((numbers >= 0) & (numbers < module.target_vocab_size)).item():
        raise ModelError(f"{name}: its d2t leads beyond the tokens of its model. Download it again.")


def _require_depth(name: str, layers: int | None, network: Any) -> None:
    """`layers`: that its model is said to have."""
    own = layers_of(network)
    if own is not None and layers is not None and layers != len(own):
        raise ModelError(
            f"the draft model {name} was trained for a model of {layers} layers, this one has {len(own)}."
        )


def _taps(name: str, network: Any, numbers: Sequence[int], width: int) -> Taps:
    layers = layers_of(network)
    if layers is None:
        raise _deaf(name)
    if not numbers or not 0 <= min(numbers) <= max(numbers) < len(layers):
        raise ModelError(
            f"the draft model {name} listens to layer {max(numbers, default=0)}, its model has {len(layers)} "
            "from 0 on: it was trained for another one."
        )
    taps = tap_layers(network, numbers)
    if taps is None:
        raise _deaf(name)
    if (heard := taps.last.shape[-1] // len(numbers)) != width:
        raise ModelError(
            f"the draft model {name} goes by hidden states of {width} numbers, its model's have {heard}: it "
            "was trained for another one."
        )
    return taps


def _deaf(name: str) -> ModelError:
    return ModelError(f"what its layers think is not to be heard, and the draft model {name} goes by that.")


def _warm_up(heads: Heads, network: Any) -> None:
    """Run every kind of pass once, so that no request waits for a kernel to be compiled."""
    count = run_through(network).shape[1]
    for row in ("0", "1"):
        run_through(network)
        heads.hear([row], [count])
    heads.read("0", (1,))
    heads.draft({"0": (2, 3), "1": (2, 3)}, 3)
    heads.reset()
