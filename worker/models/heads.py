"""The layers for multi-token prediction that a model's weights bring, as mlx-vlm builds and loads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from worker.engine.hearing import Tap
from worker.engine.sight import VisionNetwork
from worker.engine.trees import arrays_of

if TYPE_CHECKING:
    from worker.engine.heads import Heads

log = logging.getLogger(__name__)

_TRIED = (1, 2, 3)


def load_heads(folder: Path, network: Any, name: str) -> Heads | None:
    """None: there are none, or none that can be used, which is told. `network`: the model's, whose final norm
    is listened to from now on. Raises what upstream raises for weights that are damaged."""
    heads = open_heads(folder, network, name)
    if heads is None:
        return None
    said = try_pass(network)
    return heads if is_heard(heads, said, name) else None


def open_heads(folder: Path, network: Any, name: str) -> Heads | None:
    """As `load_heads`, but nothing is run: whether what it thinks is heard, nobody has tried yet."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    from worker.engine.heads import Heads

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
    model = network.whole if isinstance(network, VisionNetwork) else network
    tap = _tapped(getattr(model, "language_model", model).model)
    share = _bytes_of(module) / _bytes_of(network)
    return Heads(module, model, tap, share)


def try_pass(network: Any) -> mx.array:
    """What it says behind a few tokens, computed: of a part, all ranks must ask for it."""
    said = mx.argmax(network(mx.array([_TRIED], mx.uint32), cache=network.make_cache()), axis=-1)
    mx.eval(said)
    return said


def is_heard(heads: Heads, said: mx.array, name: str) -> bool:
    """Whether what came by in `try_pass` is what the output layer is given; that it is not is told."""
    heard = heads.tap.last
    if heard.shape[:2] == (1, len(_TRIED)) and mx.array_equal(heads.speak(heard), said).item():
        return True
    log.info("%s: what it thinks is not to be heard, and its layers for multi-token prediction rest", name)
    return False


def bytes_beside(heads: Heads, network: Any) -> int:
    """What they take beside a network whose embedding they use, and whose output layer, if that is whole."""
    own = {id(array) for array in arrays_of(network.parameters()).values()}
    arrays = heads.arrays()
    return sum(array.nbytes for array in arrays if id(array) not in own)


def _has_any(splitter: Any, folder: Path, config: dict[str, Any]) -> bool:
    return any(keys for _, keys in splitter.iter_selected(folder, splitter.read_text_config(config)))


def _tapped(inner: Any) -> Tap:
    tap: Tap = inner.norm if isinstance(inner.norm, Tap) else Tap(inner.norm)
    inner.norm = tap
    return tap


def _bytes_of(module: Any) -> int:
    return sum(leaf.nbytes for leaf in arrays_of(module.parameters()).values())
