"""Hidden-state hooks: find a network's layers and tap their outputs for hidden-state drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.runner.drafters.hidden_states import Tap, Taps
from worker.runner.trees import arrays_of
from worker.runner.vision import VisionNetwork

_TRIED = (1, 2, 3)


def model_of(network: Any) -> Any:
    """Return upstream's own network, in which drafters look up the embedding and the output layer."""
    return network.whole if isinstance(network, VisionNetwork) else network


def part_of(network: Any) -> Any:
    """Return the part with embedding, layers and final norm. Raises `AttributeError` if there is none."""
    model = model_of(network)
    return getattr(model, "language_model", model).model


def bytes_of_arrays(module: Any) -> int:
    """Return the bytes of a network's weights."""
    return sum(leaf.nbytes for leaf in arrays_of(module.parameters()).values())


def run_through(network: Any) -> mx.array:
    """Return the logits of a few tokens, [1, tokens, vocabulary], not evaluated yet."""
    logits: mx.array = network(mx.array([_TRIED], mx.uint32), cache=make_prompt_cache(network))
    return logits


def layers_of(network: Any) -> list[Any] | None:
    """Return the list of layers; None if it cannot be found."""
    try:
        inner = part_of(network)
    except AttributeError:
        return None
    layers = getattr(inner, "layers", None)
    return layers if isinstance(layers, list) and hasattr(inner, "norm") else None


def tap_layers(network: Any, numbers: Sequence[int]) -> Taps | None:
    """Tap the outputs of the layers `numbers` from now on. None: they are not the hidden states, and no tap
    is left in place."""
    layers = layers_of(network)
    if layers is None:
        return None
    own, last = list(layers), len(layers) - 1
    taps = {number: Tap(layers[number]) for number in {*numbers, last}}
    _seat(layers, taps)
    is_heard = _is_heard(network, taps, last)
    layers[:] = own
    if not is_heard:
        return None
    _seat(layers, {number: taps[number] for number in numbers})
    return Taps([taps[number] for number in numbers])


def _seat(layers: list[Any], taps: Mapping[int, Tap]) -> None:
    for number, tap in taps.items():
        layers[number] = tap


def _is_heard(network: Any, taps: Mapping[int, Tap], last: int) -> bool:
    """Check that the last layer's output is the final norm's input, and that all outputs have its shape."""
    inner = part_of(network)
    own = inner.norm
    inner.norm = norm = Tap(own)
    logits = run_through(network)
    inner.norm = own
    if any(tap.calls != 1 or not isinstance(tap.last, mx.array) for tap in (norm, *taps.values())):
        return False
    shapes = {tap.last.shape for tap in taps.values()}
    if shapes != {(*logits.shape[:2], norm.last.shape[-1])}:
        return False
    return bool(mx.array_equal(own(taps[last].last), norm.last).item())
