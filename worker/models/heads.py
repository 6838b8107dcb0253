"""The layers for multi-token prediction that a model's weights bring, as mlx-vlm builds and loads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from worker.engine.hearing import Tap
from worker.engine.trees import arrays_of
from worker.models.listening import bytes_of_arrays, model_of, part_of, run_through

if TYPE_CHECKING:
    from worker.engine.heads import Heads
    from worker.engine.predicting import Prediction

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """Layers that may guess, if what the model thinks is heard. `share`: see `Drafter`."""

    prediction: Prediction
    tap: Tap
    share: float


def load_heads(folder: Path, network: Any, name: str) -> Heads | None:
    """None: there are none, or none that can be used, which is told. `network`: the model's, whose final norm
    is listened to from now on. Raises what upstream raises for weights that are damaged."""
    opened = open_heads(folder, network, name)
    return None if opened is None else proven(opened, say(network), name)


def open_heads(folder: Path, network: Any, name: str) -> Opened | None:
    """As `load_heads`, but nothing is run: whether what it thinks is heard, nobody has tried yet."""
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
    return _opened(module, network)


def open_prediction(module: Any, network: Any) -> Heads | None:
    """On such a module of mlx-vlm's. None: what the model thinks is not to be heard."""
    opened = _opened(module, network)
    return _heard(opened, say(network))


def say(network: Any) -> mx.array:
    """What it says behind a few tokens, computed: of a part, all ranks must ask for it."""
    said = mx.argmax(run_through(network), axis=-1)
    mx.eval(said)
    return said


def proven(opened: Opened, said: mx.array, name: str) -> Heads | None:
    """None: what came by in `say` is not what the output layer is given, which is told."""
    heads = _heard(opened, said)
    if heads is None:
        log.info(
            "%s: what it thinks is not to be heard, and its layers for multi-token prediction rest", name
        )
    return heads


def bytes_beside(opened: Opened, network: Any) -> int:
    """What they take beside a network whose embedding they use, and whose output layer, if that is whole."""
    own = {id(array) for array in arrays_of(network.parameters()).values()}
    return sum(array.nbytes for array in opened.prediction.arrays() if id(array) not in own)


def _opened(module: Any, network: Any) -> Opened:
    from worker.engine.predicting import Prediction

    tap, share = _tapped(part_of(network)), bytes_of_arrays(module) / bytes_of_arrays(network)
    return Opened(Prediction(module, model_of(network)), tap, share)


def _heard(opened: Opened, said: mx.array) -> Heads | None:
    from worker.engine.heads import Heads

    prediction, tap, share = opened
    if tap.last.shape[:2] != said.shape or not mx.array_equal(prediction.speak(tap.last), said).item():
        return None
    return Heads(prediction, tap, share)


def _has_any(splitter: Any, folder: Path, config: dict[str, Any]) -> bool:
    return any(keys for _, keys in splitter.iter_selected(folder, splitter.read_text_config(config)))


def _tapped(inner: Any) -> Tap:
    tap: Tap = inner.norm if isinstance(inner.norm, Tap) else Tap(inner.norm)
    inner.norm = tap
    return tap
