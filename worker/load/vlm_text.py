"""Open networks of mlx-vlm that generate text, and probe their language models on text.

mlx-vlm also has models for image generation, detection and classification, and diffusion language models; its
classes and attributes tell them apart. A probe at load checks that the language model alone answers a text
like the whole network: some need more inputs than tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.interfaces import ModelError
from worker.load.config import translated_rope
from worker.load.weights import open_with_config
from worker.runner.vision import VisionNetwork

ERROR_MAX = 0.2
"""Maximum relative error of logits against upstream's. Rounding of low-bit weights through many layers stays
below it; a missing or misplaced image is far above it."""

_PACKAGE = "mlx_vlm.models."
MEAN_ERROR_MAX = 0.05
"""Maximum mean relative error over all positions of a text."""
_TEXT = tuple((31 * place + 3) % 97 + 1 for place in range(100))
_CUTS = (1, 4, 6, 37, 44, 75, 98, 99)
"""Positions at which the text is cut into chunks."""


def load_network(folder: Path) -> VisionNetwork:
    """Open upstream's network, weights not read yet. Raises `ModelError` if it is not autoregressive, or
    whatever upstream raises."""
    from mlx_vlm.generate.diffusion import is_diffusion_model
    from mlx_vlm.utils import get_model_and_args, load_model

    config = json.loads((folder / "config.json").read_bytes())
    require_writer(config)
    open_whole = partial(load_model, lazy=True)
    arguments = getattr(get_model_and_args(config)[0], "TextConfig", None)
    told = translated_rope(config, text=None if arguments is None else signature(arguments).parameters)
    whole = open_with_config(folder, config | told, open_whole) if told else open_whole(folder)
    if is_diffusion_model(whole):
        raise ModelError("it generates by diffusion, many tokens at a time, which is not supported.")
    if not hasattr(whole, "language_model") or not hasattr(whole, "get_input_embeddings"):
        raise ValueError("its network has no separate language model and input embeddings")
    return VisionNetwork(whole)


def require_writer(config: dict[str, Any]) -> None:
    """Raise `ModelError` if upstream's class for a config does not generate text. Reads no weights."""
    from mlx_vlm.utils import get_model_and_args

    if config.get("model_file"):  # upstream would run it without asking
        raise ModelError("its config.json asks to run code of its own, which is never done.")
    family, _ = get_model_and_args(config)
    if not family.__name__.startswith(_PACKAGE) or not _writes(getattr(family, "Model", None)):
        name = family.__name__.rpartition(".")[2]
        raise ModelError(f"mlx-vlm has the architecture {name!r} for a task other than text generation.")


def _writes(network: Any) -> bool:
    """Return whether its class embeds images into text and is not marked as a classifier."""
    embeds = getattr(network, "get_input_embeddings", None)
    takes = signature(embeds).parameters if embeds else {}
    return "pixel_values" in takes and not getattr(network, "decision_types", ())


def like(network: VisionNetwork) -> Callable[[Path], VisionNetwork]:
    """Return a function that opens a folder like `network`, with the position axes found by `try_text`."""

    def open_network(folder: Path) -> VisionNetwork:
        opened = load_network(folder)
        opened.axes = network.axes
        return opened

    return open_network


def try_text(network: VisionNetwork) -> None:
    """Probe a text: in chunks, as the engine runs it, and whole, as upstream does.

    Sets `network.axes` to what matches: position ids of three axes, of one, or none. Raises `ModelError` if
    nothing matches.
    """
    reasons = []
    for axes in (3, 1, 0) if network.axes else (0,):
        network.axes = axes
        if not (reason := _wrong(network)):
            return
        reasons.append(reason)
    raise ModelError(reasons[0])


def _wrong(network: VisionNetwork) -> str:
    """Return what differs from upstream; empty if nothing does."""
    try:
        theirs = _upstream(network.whole)
        error = _mean_error(_ours(network), theirs)
    except Exception as failure:  # upstream's networks raise anything if inputs are missing
        reason = (str(failure) or type(failure).__name__).splitlines()[0]
        return f"its language model cannot be run on text alone ({reason})."
    if not error <= MEAN_ERROR_MAX:
        return f"its logits change when a text is run in chunks (by {error:.2f})."
    return ""


def _ours(network: VisionNetwork) -> mx.array:
    """Return the logits after each token, [tokens, vocabulary], run in chunks."""
    caches = network.make_cache()
    parts = [_TEXT[first:last] for first, last in pairwise((0, *_CUTS, len(_TEXT)))]
    return mx.concatenate([network(mx.array([part], mx.uint32), cache=caches)[0] for part in parts])


def _upstream(whole: Any) -> mx.array:
    """Return the same logits from upstream: all but the last token in one call with all of the network's own
    inputs; the last token like a sampled one."""
    from mlx_vlm.models.cache import make_prompt_cache

    ids, following = mx.array([_TEXT[:-1]], mx.int32), mx.array([_TEXT[-1:]], mx.int32)
    features = whole.get_input_embeddings(ids, None, mask=mx.ones_like(ids)).to_dict()
    given = {name: value for name, value in features.items() if value is not None}
    caches = make_prompt_cache(whole.language_model)
    first = whole.language_model(inputs=ids, cache=caches, **given).logits[0]
    return mx.concatenate([first, whole.language_model(following, cache=caches).logits[0]])


def _mean_error(ours: mx.array, theirs: mx.array) -> float:
    """Return the mean error over all positions, because rounding may choose another expert at one of them."""
    errors = [relative_error(some, others) for some, others in zip(ours, theirs, strict=True)]
    return sum(errors) / len(errors)


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """Return the norm of the difference of logits, relative to `theirs`."""
    difference = (ours - theirs).astype(mx.float32)
    ratio: Any = mx.linalg.norm(difference) / mx.linalg.norm(theirs.astype(mx.float32))
    return float(ratio.item())
