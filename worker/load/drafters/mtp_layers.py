"""Load a model's own multi-token prediction (MTP) layers, which mlx-vlm implements, as a drafter."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from worker.load.drafters.hidden_state_hooks import bytes_of_arrays, model_of, part_of, run_through
from worker.runner.drafters.hidden_states import Tap
from worker.runner.trees import arrays_of

if TYPE_CHECKING:
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer
    from worker.runner.drafters.mtp_eagle import MtpDraft

log = logging.getLogger(__name__)


class MtpLayers(NamedTuple):
    """MTP layers whose hidden-state hook is not verified yet. `relative_cost`: see `DraftProposer`."""

    prediction: MtpDraft
    tap: Tap
    relative_cost: float


def load_heads(folder: Path, network: Any, name: str) -> HiddenStateProposer | None:
    """Load the MTP layers of `folder` as a drafter. `network`: the model's; its final norm is tapped from now
    on. None: there are none, or they are not usable, which is logged. Raises what upstream raises for damaged
    weights."""
    opened = open_heads(folder, network, name)
    return None if opened is None else proven(opened, say(network), name)


def open_heads(folder: Path, network: Any, name: str) -> MtpLayers | None:
    """Load the MTP layers without running anything; the hidden-state hook is not verified yet."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    config = json.loads((folder / "config.json").read_bytes())
    splitter = get_mtp_splitter(source_config=config)
    if splitter is None or not _has_any(splitter, folder, config):
        return None
    module = splitter.load(folder, source_config=config)
    if not isinstance(module, Qwen3_5MTPDraftModel):
        log.info(
            "%s: its multi-token prediction layers (%s) are not supported", name, splitter.output_model_type
        )
        return None
    return _opened(module, network)


def open_prediction(module: Any, network: Any) -> HiddenStateProposer | None:
    """Build a drafter on an MTP module of mlx-vlm. None: the hidden states cannot be captured."""
    opened = _opened(module, network)
    return _pending_states(opened, say(network))


def say(network: Any) -> mx.array:
    """Return the greedy next tokens for a short prompt, evaluated. Of a shard, all ranks must call this."""
    expected_tokens = mx.argmax(run_through(network), axis=-1)
    mx.eval(expected_tokens)
    return expected_tokens


def proven(opened: MtpLayers, expected_tokens: mx.array, name: str) -> HiddenStateProposer | None:
    """Verify the hook against `expected_tokens` and return the drafter. None: the tapped states are not the
    output layer's input, which is logged."""
    heads = _pending_states(opened, expected_tokens)
    if heads is None:
        log.info(
            "%s: its hidden states cannot be captured, so its multi-token prediction layers are not used",
            name,
        )
    return heads


def bytes_beside(opened: MtpLayers, network: Any) -> int:
    """Return the bytes of the layers without arrays shared with `network` (embedding, whole output layer)."""
    own = {id(array) for array in arrays_of(network.parameters()).values()}
    return sum(array.nbytes for array in opened.prediction.arrays() if id(array) not in own)


def _opened(module: Any, network: Any) -> MtpLayers:
    from worker.runner.drafters.mtp_eagle import MtpDraft

    tap, relative_cost = _tapped(part_of(network)), bytes_of_arrays(module) / bytes_of_arrays(network)
    return MtpLayers(MtpDraft(module, model_of(network)), tap, relative_cost)


def _pending_states(opened: MtpLayers, expected_tokens: mx.array) -> HiddenStateProposer | None:
    from worker.runner.drafters.hidden_state_proposer import HiddenStateProposer

    prediction, tap, relative_cost = opened
    if (
        tap.last.shape[:2] != expected_tokens.shape
        or not mx.array_equal(prediction.greedy_token(tap.last), expected_tokens).item()
    ):
        return None
    return HiddenStateProposer(prediction, tap, relative_cost)


def _has_any(splitter: Any, folder: Path, config: dict[str, Any]) -> bool:
    return any(keys for _, keys in splitter.iter_selected(folder, splitter.read_text_config(config)))


def _tapped(inner: Any) -> Tap:
    tap: Tap = inner.norm if isinstance(inner.norm, Tap) else Tap(inner.norm)
    inner.norm = tap
    return tap
