"""Load drafters trained for one target, which mlx-vlm implements: EAGLE-3, DFlash and its variants, and
multi-token prediction (MTP) layers in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from worker.interfaces import ModelError
from worker.load.drafters.draft_model import DraftModel
from worker.load.drafters.hidden_state_hooks import (
    bytes_of_arrays,
    layers_of,
    model_of,
    run_through,
    tap_layers,
)
from worker.load.drafters.mtp_layers import open_prediction

if TYPE_CHECKING:
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
    from worker.runner.drafters.hidden_states import Taps

_EAGLE_LAYERS = 3
"""Number of target layers whose hidden states an EAGLE-3 drafter reads."""
_UPSTREAM_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, ImportError)
"""Errors that upstream raises for an inconsistent folder."""


def load_trained(found: DraftModel, network: Any) -> HiddenStateProposer:
    """Load a trained drafter and warm it up. `network`: of the target; some of its layers are tapped from now
    on. Raises `ModelError`."""
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
        raise ModelError(f"{found.name}: its config.json asks to run code of its own, which is never done.")
    try:
        return load_drafter(str(found.folder))[0]
    except _UPSTREAM_ERRORS as error:
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"mlx-vlm cannot load the draft model {found.name} ({told}).") from None


def _config_of(found: DraftModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((found.folder / "config.json").read_bytes())
    return config


def _attends_plainly(module: Any) -> bool:
    """Return whether its layers have the attention class that ours replaces."""
    from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention

    return all(type(layer.self_attn) is DFlashAttention for layer in module.layers)


def _eagle(name: str, module: Any, network: Any) -> HiddenStateProposer:
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
    from worker.runner.drafters.mtp_eagle import EagleDraft

    config = module.config
    numbers = list(config.capture_layer_ids)
    if len(numbers) != _EAGLE_LAYERS:
        raise ModelError(
            f"{name}: it reads {len(numbers)} layers, where an EAGLE-3 drafter reads {_EAGLE_LAYERS}."
        )
    _require_vocabulary(name, module.target_vocab_size, network)
    _require_tokens(name, module, network)
    taps = _taps(name, network, numbers, module.target_hidden_size)
    share = bytes_of_arrays(module) / bytes_of_arrays(network)
    return HiddenStateProposer(EagleDraft(module, model_of(network)), taps, share)


def _blocks(found: DraftModel, module: Any, network: Any) -> HiddenStateProposer:
    from worker.runner.drafters.dflash import DFlashDraft
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer

    name, config = found.name, module.config
    _require_vocabulary(name, config.vocab_size, network)
    told = _config_of(found)
    _require_depth(name, (told | (told.get("dflash_config") or {})).get("num_target_layers"), network)
    taps = _taps(name, network, list(config.target_layer_ids), config.hidden_size)
    try:
        blocks = DFlashDraft(module, model_of(network))
    except AttributeError:
        raise ModelError(f"{name}: it needs the model's embedding, which is not found.") from None
    # Parts shared with the target, such as the output layer, count here too.
    share = bytes_of_arrays(module) / bytes_of_arrays(network)
    return HiddenStateProposer(blocks, taps, share)


def _prediction(name: str, module: Any, network: Any) -> HiddenStateProposer:
    heads = open_prediction(module, network) if layers_of(network) is not None else None
    if heads is None:
        raise _deaf(name)
    return heads


def _require_vocabulary(name: str, tokens: int, network: Any) -> None:
    known = run_through(network).shape[-1]
    if tokens != known:
        raise ModelError(
            f"the draft model {name} has {tokens} tokens, its target {known}: it was trained for another "
            "target."
        )


def _require_tokens(name: str, module: Any, network: Any) -> None:
    """Require that a reduced vocabulary (`d2t`) is within the target's."""
    if module.d2t is None:
        return
    numbers = mx.arange(module.draft_vocab_size) + module.d2t
    if not mx.all((numbers >= 0) & (numbers < module.target_vocab_size)).item():
        raise ModelError(f"{name}: its d2t leads beyond the tokens of its target. Download it again.")


def _require_depth(name: str, layers: int | None, network: Any) -> None:
    """Require that the target has `layers` layers, if the drafter's config says so."""
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
            f"the draft model {name} reads layer {max(numbers, default=0)}, but its target has {len(layers)} "
            "layers, counted from 0: it was trained for another target."
        )
    taps = tap_layers(network, numbers)
    if taps is None:
        raise _deaf(name)
    if (heard := taps.last.shape[-1] // len(numbers)) != width:
        raise ModelError(
            f"the draft model {name} reads hidden states of size {width}, its target's have {heard}: it was "
            "trained for another target."
        )
    return taps


def _deaf(name: str) -> ModelError:
    return ModelError(f"its hidden states cannot be captured, and the draft model {name} needs them.")


def _warm_up(heads: HiddenStateProposer, network: Any) -> None:
    """Run each kind of pass once, so that no request waits for kernels to compile."""
    count = run_through(network).shape[1]
    for row in ("0", "1"):
        run_through(network)
        heads.on_hidden_states([row], [count])
    heads.read("0", (1,))
    heads.draft({"0": (2, 3), "1": (2, 3)}, 3)
    heads.reset()
