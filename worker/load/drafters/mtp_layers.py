"""Load multi-token-prediction (MTP) layers as a drafter: a model's own, or those in a folder of their own.

mlx-vlm reads the weights and implements the layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.interfaces import ModelError
from worker.load.drafters.draft_model import DraftModel
from worker.process.device_errors import raise_if_device_failed
from worker.runner.drafters.mtp import Tap
from worker.runner.trees import arrays_of
from worker.runner.vision import VisionNetwork

if TYPE_CHECKING:
    from worker.runner.drafters.mtp import HiddenStateProposer

log = logging.getLogger(__name__)

_TRIED = (1, 2, 3)
_MISFITS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError)
"""Errors that upstream raises for a folder that is damaged or belongs to another model."""


def load_own_layers(folder: Path, network: Any, name: str) -> HiddenStateProposer | None:
    """Load the MTP layers of `folder` as a drafter. `network`: the model's; its final norm is tapped from now
    on. None: there are none, or they are not usable, which is logged: the model is served without."""
    try:
        module = _own_module(folder)
        if module is None:
            return None
        drafter, reason = _drafter(module, network), "its hidden states cannot be captured"
    except _MISFITS as error:
        raise_if_device_failed(error)
        drafter, reason = None, _line(error)
    if drafter is None:
        log.warning("%s: its multi-token prediction layers are not used: %s", name, reason)
    return drafter


def _own_module(folder: Path) -> Any | None:
    """Return the MTP layers of a model folder; None if it has none. Raises what upstream raises, and
    `ValueError` for layers of other kinds."""
    if not any(name.startswith("mtp.") for file in folder.glob("*.safetensors") for name in _tensors(file)):
        return None
    # Imported for models that have such layers only: it takes half a second.
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    config = json.loads((folder / "config.json").read_bytes())
    splitter = get_mtp_splitter(source_config=config)
    module = splitter.load(folder, source_config=config) if splitter is not None else None
    if not isinstance(module, Qwen3_5MTPDraftModel):
        raise ValueError(f"those of {config.get('model_type')!r} are not supported")
    return module


def _tensors(file: Path) -> Iterable[str]:
    """Return the names in the header of a safetensors file."""
    with file.open("rb") as opened:
        names: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return names


def load_separate_layers(found: DraftModel, network: Any) -> HiddenStateProposer:
    """Load MTP layers that have a folder of their own. `network`: of the model. Raises `ModelError`."""
    from mlx_vlm.speculative.drafters import load_drafter

    try:
        drafter = _drafter(load_drafter(str(found.folder))[0], network)
    except _MISFITS as error:
        raise_if_device_failed(error)
        raise ModelError(
            f"the multi-token prediction layers in {found.name} do not fit the model ({_line(error)}). Use"
            " those that were trained with it."
        ) from None
    if drafter is None:
        raise ModelError(
            f"its hidden states cannot be captured, and {found.name} needs them: leave --draft-model out."
        )
    return drafter


def _drafter(module: Any, network: Any) -> HiddenStateProposer | None:
    """Build a drafter on an MTP module of mlx-vlm, and warm it up. None: what the final norm returns is not
    what the output layer reads."""
    from worker.runner.drafters.mtp import HiddenStateProposer, MtpNetwork

    whole = network.whole if isinstance(network, VisionNetwork) else network
    language = getattr(whole, "language_model", whole)
    layers, inner, drafter = MtpNetwork(module, language), language.model, None
    tap = inner.norm = Tap(inner.norm)
    try:
        logits: mx.array = network(mx.array([_TRIED], mx.uint32), cache=make_prompt_cache(network))
        if tap.last.shape[:2] == logits.shape[:2] and mx.array_equal(
            layers.greedy_token(tap.last), mx.argmax(logits, axis=-1)
        ):
            drafter = HiddenStateProposer(layers, tap, _weight_bytes(module) / _weight_bytes(network))
            _warm_up(drafter)
    finally:
        if drafter is None:
            inner.norm = tap.module
    return drafter


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _weight_bytes(network: Any) -> int:
    return sum(leaf.nbytes for leaf in arrays_of(network.parameters()).values())


def _warm_up(drafter: HiddenStateProposer) -> None:
    """Run each kind of pass once, so that no request waits for kernels to compile."""
    for row in ("0", "1"):
        drafter.on_hidden_states([row], [len(_TRIED)])
    drafter.read("0", (1,))
    drafter.draft({"0": (2, 3), "1": (2, 3)}, 3)
    drafter.reset()
