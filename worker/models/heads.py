"""The layers for multi-token prediction that a model's weights bring, as mlx-vlm builds and loads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from worker.engine.hearing import Tap
from worker.models.listening import bytes_of_arrays, model_of, part_of, run_through

if TYPE_CHECKING:
    from worker.engine.heads import Heads

log = logging.getLogger(__name__)


def load_heads(folder: Path, network: Any, name: str) -> Heads | None:
    """None: there are none, or none that can be used, which is told. `network`: the model's, whose final norm
    is listened to from now on. Raises what upstream raises for weights that are damaged."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    config = json.loads((folder / "config.json").read_bytes())
    splitter = get_mtp_splitter(source_config=config)
    if splitter is None or not _has_any(splitter, folder, config):
        return None
    module = splitter.load(folder, source_config=config)
    if not isinstance(module, Qwen3_5MTPDraftModel):
        log.info(
            "%s: its layers for multi-token prediction (%s) are not used", name, splitter.output_model_type
        )
        return None
    heads = open_prediction(module, network)
    if heads is None:
        log.info(
            "%s: what it thinks is not to be heard, and its layers for multi-token prediction rest", name
        )
    return heads


def open_prediction(module: Any, network: Any) -> Heads | None:
    """On such a module of mlx-vlm's. None: what the model thinks is not to be heard."""
    from worker.engine.heads import Heads
    from worker.engine.predicting import Prediction

    tap, share = _tapped(part_of(network)), bytes_of_arrays(module) / bytes_of_arrays(network)
    prediction = Prediction(module, model_of(network))
    said = mx.argmax(run_through(network), axis=-1)
    if tap.last.shape[:2] != said.shape or not mx.array_equal(prediction.speak(tap.last), said).item():
        return None  # what comes by is not what the output layer is given
    return Heads(prediction, tap, share)


def _has_any(splitter: Any, folder: Path, config: dict[str, Any]) -> bool:
    return any(keys for _, keys in splitter.iter_selected(folder, splitter.read_text_config(config)))


def _tapped(inner: Any) -> Tap:
    tap: Tap = inner.norm if isinstance(inner.norm, Tap) else Tap(inner.norm)
    inner.norm = tap
    return tap
