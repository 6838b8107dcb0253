"""A network of mlx-vlm's, with whatever it has besides a language model: opened, if it writes text.

Upstream has more there than models that write: some make images, find things in them, or judge texts, and
some write all of a text at once. Which is which it says itself, in classes and attributes. That a language
model answers a text as its whole does is found by trying, when it is loaded: some want to be told more than
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.contract import ModelError
from worker.engine.sight import VisionNetwork

ERROR_MAX = 0.2
"""Of logits that should be upstream's, relative to these: rounding in few bits, through many layers, stays
below it; what is not seen, or seen elsewhere, is far beyond."""

_PACKAGE = "mlx_vlm.models."
MEAN_ERROR_MAX = 0.05
"""Of all of them in a text, their mean."""
_TEXT = tuple((31 * place + 3) % 97 + 1 for place in range(100))
_CUTS = (1, 4, 6, 37, 44, 75, 98, 99)
"""Where the text is cut into parts."""


def load_network(folder: Path) -> VisionNetwork:
    """Upstream's network, its weights not read yet. Raises `ModelError` for one that does not write token
    after token, or one of many errors."""
    from mlx_vlm.generate.diffusion import is_diffusion_model
    from mlx_vlm.utils import load_model

    require_writer(json.loads((folder / "config.json").read_bytes()))
    whole = load_model(folder, lazy=True)
    if is_diffusion_model(whole):
        raise ModelError("it writes by diffusion, many tokens at a time, which is not served.")
    if not hasattr(whole, "language_model") or not hasattr(whole, "get_input_embeddings"):
        raise ValueError("its network does not tell what it sees from what it says")
    return VisionNetwork(whole)


def require_writer(config: dict[str, Any]) -> None:
    """Raises `ModelError` where what upstream has for a config writes no text. Reads no weights."""
    from mlx_vlm.utils import get_model_and_args

    if config.get("model_file"):  # which upstream would run unasked
        raise ModelError("its config.json asks for code of its own to be run, which is never done.")
    family, _ = get_model_and_args(config)
    if not family.__name__.startswith(_PACKAGE) or not _writes(getattr(family, "Model", None)):
        name = family.__name__.rpartition(".")[2]
        raise ModelError(f"mlx-vlm has the architecture {name!r} for another task than to write text.")


def _writes(network: Any) -> bool:
    """Whether its class is of those that put images into texts, and does not say that it only decides."""
    embeds = getattr(network, "get_input_embeddings", None)
    takes = signature(embeds).parameters if embeds else {}
    return "pixel_values" in takes and not getattr(network, "decision_types", ())


def like(network: VisionNetwork) -> Callable[[Path], VisionNetwork]:
    """Opens a folder as that network was opened, and tried."""

    def open_network(folder: Path) -> VisionNetwork:
        opened = load_network(folder)
        opened.axes = network.axes
        return opened

    return open_network


def try_text(network: VisionNetwork) -> None:
    """Let it read: a text in parts, as the engine runs it, and whole, as upstream does. It is told positions
    of three axes, of one, or finds them itself, whichever is right.

    Raises `ModelError` where nothing is.
    """
    reasons = []
    for axes in (3, 1, 0) if network.axes else (0,):
        network.axes = axes
        if not (reason := _wrong(network)):
            return
        reasons.append(reason)
    raise ModelError(reasons[0])


def _wrong(network: VisionNetwork) -> str:
    """What is not as it should be, if anything."""
    try:
        theirs = _upstream(network.whole)
        error = _mean_error(_ours(network), theirs)
    except Exception as failure:  # upstream's networks raise whatever they lack something with
        reason = (str(failure) or type(failure).__name__).splitlines()[0]
        return f"its language model does not answer a text alone ({reason})."
    if not error <= MEAN_ERROR_MAX:
        return f"it reads a text in parts otherwise than as a whole (by {error:.2f})."
    return ""


def _ours(network: VisionNetwork) -> mx.array:
    """Logits after each token, [tokens, vocabulary]."""
    caches = network.make_cache()
    parts = [_TEXT[first:last] for first, last in pairwise((0, *_CUTS, len(_TEXT)))]
    return mx.concatenate([network(mx.array([part], mx.uint32), cache=caches)[0] for part in parts])


def _upstream(whole: Any) -> mx.array:
    """The same, of all but the last token in one call of the network's own, told all that it says of them;
    the last comes as a token that it has drawn."""
    from mlx_vlm.models.cache import make_prompt_cache

    ids, following = mx.array([_TEXT[:-1]], mx.int32), mx.array([_TEXT[-1:]], mx.int32)
    features = whole.get_input_embeddings(ids, None, mask=mx.ones_like(ids)).to_dict()
    given = {name: value for name, value in features.items() if value is not None}
    caches = make_prompt_cache(whole.language_model)
    first = whole.language_model(inputs=ids, cache=caches, **given).logits[0]
    return mx.concatenate([first, whole.language_model(following, cache=caches).logits[0]])


def _mean_error(ours: mx.array, theirs: mx.array) -> float:
    """Of all places in the text: rounding may choose another expert in one of them."""
    errors = [relative_error(some, others) for some, others in zip(ours, theirs, strict=True)]
    return sum(errors) / len(errors)


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """How far logits are from those that they should be, relative to these."""
    difference = (ours - theirs).astype(mx.float32)
    ratio: Any = mx.linalg.norm(difference) / mx.linalg.norm(theirs.astype(mx.float32))
    return float(ratio.item())
