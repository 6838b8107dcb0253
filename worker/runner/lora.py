"""Adapters (LoRA and DoRA): rows of one forward pass that use different ones.

The layers that adapters change get another class, whose call adds each row's low-rank product to the product
of the base weights, which is computed once for all rows. Their weights and names stay as they are. Such a
layer finds the rows of the current pass in `AdapterBatch`, which the engine sets around each forward pass. In
a pass without adapters, the plain layer runs.

A pass whose rows all use one adapter computes what upstream's layers compute. Otherwise, the weights of a
layer's adapters are stacked, padded with zeros to the largest rank, and gathered by row; place 0 has zeros
only, for rows that this layer does not change. Experts are chosen by token and sorted, so that rows cannot be
recognized any more: there, the numbers of experts carry those of the rows' adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.interfaces import AdapterError

NO_ADAPTER = ""
"""The adapter of a row that uses none."""
_GATES = ("SwitchGLU", "SwitchMLP")
"""Upstream's modules that call their layers of experts as `layer(x, indices)`."""
_EXPERTS = ("SwitchLinear", "QuantizedSwitchLinear")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What an adapter adds to a layer, in mlx-lm's layout.

    `a`, `b`: [inputs, rank] and [rank, outputs]; of experts, [experts, rank, inputs] and [experts, outputs,
    rank]; of an embedding, [tokens, rank] and [rank, width]. `magnitude`: DoRA's, [outputs]; None: LoRA.
    """

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None = None


AdapterWeights = Mapping[str, LayerWeights]
"""The layers that an adapter changes, by their path in the network."""


@dataclass(slots=True)
class PassRows:
    """The rows of a forward pass with adapters. `names`: the adapter of each row. `adapters`: these, without
    the base. `distinct`: these in order, behind the base. `only`: the adapter of all rows; None: they
    differ."""

    names: tuple[str, ...]
    adapters: frozenset[str]
    distinct: tuple[str, ...]
    only: str | None
    numbers: mx.array
    """Place of each row's adapter in `distinct`, [rows] uint32."""
    _places: dict[tuple[str, ...], mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, names: tuple[str, ...]) -> PassRows:
        adapters = frozenset(names) - {NO_ADAPTER}
        distinct = (NO_ADAPTER, *sorted(adapters))
        numbers = mx.array([distinct.index(name) for name in names], mx.uint32)
        return cls(names, adapters, distinct, names[0] if len({*names}) == 1 else None, numbers)

    def are_of(self, names: frozenset[str]) -> mx.array:
        """Return which rows use one of the adapters, [rows, 1, 1] bool."""
        return mx.array([name in names for name in self.names])[:, None, None]

    def places(self, order: tuple[str, ...]) -> mx.array:
        """Return the place of each of `distinct` in a stack: the adapters in `order` have those from 1 on."""
        if order not in self._places:
            at = {name: place for place, name in enumerate(order, start=1)}
            self._places[order] = mx.array([at.get(name, 0) for name in self.distinct], mx.uint32)
        return self._places[order]


class AdapterBatch:
    """The rows of the forward pass that is being built; None outside of passes and without adapters."""

    def __init__(self) -> None:
        self.rows: PassRows | None = None
        self._last: tuple[tuple[str, ...], PassRows] | None = None

    @contextmanager
    def applied(self, names: Sequence[str]) -> Iterator[None]:
        """Apply the adapters of the rows, in order, to the forward passes built in the body."""
        if not any(names):
            yield
            return
        key = tuple(names)
        if self._last is None or self._last[0] != key:
            self._last = key, PassRows.of(key)
        self.rows = self._last[1]
        try:
            yield
        finally:
            self.rows = None


@dataclass(frozen=True, slots=True)
class Stack:
    """The weights of a layer's adapters of one data type. `order`: the adapters at the places from 1 on.
    `scale`: [places]. `norms`: DoRA's factor of each output, [places, outputs]; None: all are LoRA."""

    order: tuple[str, ...]
    a: mx.array
    b: mx.array
    scale: mx.array
    norms: mx.array | None
    dora: frozenset[str]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.a, self.b, self.scale, *([] if self.norms is None else [self.norms])]


class LayerAdapters:
    """The adapters of one layer, and their stacks."""

    def __init__(self, batch: AdapterBatch, layer: nn.Module) -> None:
        self.batch = batch
        self._layer = layer
        self.weights: dict[str, LayerWeights] = {}
        """Views into the stacks, as wide as each adapter is."""
        self.norms: dict[str, mx.array] = {}
        """DoRA's factor of each output: the magnitude over the norm of the adapted weights."""
        self.stacks: list[Stack] = []
        """The stacks of all adapters, one for each data type."""

    def add(self, name: str, weights: LayerWeights) -> None:
        self.weights[name] = weights
        if weights.magnitude is not None:
            self.norms[name] = weights.magnitude / _norm_of(dense_weight(self._layer), weights)
        self._stack()

    def remove(self, name: str) -> bool:
        """Remove an adapter; return whether it was there."""
        self.norms.pop(name, None)
        if self.weights.pop(name, None) is None:
            return False
        self._stack()
        return True

    def _stack(self) -> None:
        kinds: dict[Any, list[str]] = {}
        for name, weights in self.weights.items():
            kinds.setdefault((weights.a.dtype, weights.b.dtype), []).append(name)
        self.stacks = [self._stacked(names) for names in kinds.values()]
        for stack in self.stacks:
            for place, name in enumerate(stack.order, start=1):
                self.weights[name] = _view(stack, place, self.weights[name])
                if name in stack.dora and stack.norms is not None:
                    self.norms[name] = stack.norms[place]

    def _stacked(self, names: Sequence[str]) -> Stack:
        parts = [self.weights[name] for name in names]
        a_axis, b_axis = _rank_axes(parts[0])
        rank = max(part.a.shape[a_axis] for part in parts)
        norms = None
        if dora := frozenset(names) & self.norms.keys():
            ones = mx.ones_like(self.norms[min(dora)])
            norms = mx.stack([ones, *(self.norms.get(name, ones) for name in names)])
        return Stack(
            order=tuple(names),
            a=_padded([part.a for part in parts], a_axis, rank),
            b=_padded([part.b for part in parts], b_axis, rank),
            scale=mx.array([0.0, *(part.scale for part in parts)], mx.float32),
            norms=norms,
            dora=dora,
        )

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that own memory."""
        return [array for stack in self.stacks for array in stack.arrays]


def _rank_axes(weights: LayerWeights) -> tuple[int, int]:
    """Return the axes of the rank in `a` and in `b`."""
    return (1, 2) if weights.a.ndim == 3 else (1, 0)


def _view(stack: Stack, place: int, own: LayerWeights) -> LayerWeights:
    """Return an adapter's weights in a stack, without the padding."""
    a_axis, b_axis = _rank_axes(own)
    rank = own.a.shape[a_axis]
    a, b = stack.a[place], stack.b[place]
    a = a[:, :rank]
    b = b[..., :rank] if b_axis == 2 else b[:rank]
    return replace(own, a=a, b=b)


def _padded(parts: Sequence[mx.array], axis: int, rank: int) -> mx.array:
    """Stack arrays behind zeros, all padded to `rank` along an axis."""
    wide = []
    for part in parts:
        widths = [(0, rank - part.shape[axis] if index == axis else 0) for index in range(part.ndim)]
        wide.append(mx.pad(part, widths))
    return mx.stack([mx.zeros_like(wide[0]), *wide])


def dense_weight(layer: Any) -> mx.array:
    """Return a layer's weight, dequantized if it is quantized."""
    if "scales" not in layer:
        weight: mx.array = layer.weight
        return weight
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def _norm_of(weight: mx.array, own: LayerWeights) -> mx.array:
    """Return the norm of each output's adapted weights, as upstream's `DoRALinear` computes it."""
    return mx.linalg.norm(weight + (own.scale * own.b.T) @ own.a.T, axis=1)


class _AdaptedLinear(nn.Module):
    """Mixed into the class of a linear layer."""

    adapters: LayerAdapters

    def _base(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)
        return y

    def __call__(self, x: mx.array) -> mx.array:
        rows = self.adapters.batch.rows
        if rows is None:
            return self._base(x)
        if rows.only is not None:
            return self._alone(x, rows.only)
        each = x.reshape(len(rows.names), -1, x.shape[-1])
        y = self._products(each, rows)
        for stack in self.adapters.stacks:
            if not rows.adapters.isdisjoint(stack.order):
                y = self._gathered(each, y, stack, rows)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _alone(self, x: mx.array, name: str) -> mx.array:
        """As upstream's `LoRALinear` and `DoRALinear`."""
        own = self.adapters.weights.get(name)
        if own is None:
            return self._base(x)
        z = (x @ own.a) @ own.b
        update = (own.scale * z).astype(x.dtype)
        if own.magnitude is None:
            return self._base(x) + update
        y = self.adapters.norms[name].astype(x.dtype) * (x @ dense_weight(self).T + update)
        return y + self.bias if "bias" in self else y

    def _products(self, x: mx.array, rows: PassRows) -> mx.array:
        """Return the products of the base weights. For DoRA, upstream dequantizes them and adds the bias
        last."""
        dora = rows.adapters & self.adapters.norms.keys()
        if not dora or ("scales" not in self and "bias" not in self):
            return self._base(x)
        own = x @ dense_weight(self).T
        if all(name in dora for name in rows.names):
            return own
        return mx.where(rows.are_of(dora), own, self._base(x))

    def _gathered(self, x: mx.array, y: mx.array, stack: Stack, rows: PassRows) -> mx.array:
        """Add what a stack's adapters add to their rows. `x`, `y`: [rows, tokens, …]."""
        at = rows.places(stack.order)[rows.numbers]
        z = mx.gather_mm(mx.gather_mm(x, stack.a, rhs_indices=at), stack.b, rhs_indices=at)
        y = y + (stack.scale.astype(z.dtype)[at][:, None, None] * z).astype(x.dtype)
        if stack.norms is None or rows.adapters.isdisjoint(stack.dora):
            return y
        y = stack.norms[at].astype(x.dtype)[:, None] * y
        return mx.where(rows.are_of(stack.dora), y + self.bias, y) if "bias" in self else y


class _AdaptedEmbedding(nn.Module):
    """Mixed into the class of an embedding, which may also be the output layer."""

    adapters: LayerAdapters

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)
        rows = self.adapters.batch.rows
        if rows is None:
            return y
        if rows.only is not None:
            own = self.adapters.weights.get(rows.only)
            return y if own is None else y + (own.scale * (own.a[x] @ own.b)).astype(y.dtype)
        for stack in self.adapters.stacks:
            at = rows.places(stack.order)[rows.numbers]
            ids = x.reshape(len(rows.names), -1)
            z = mx.gather_mm(stack.a[at[:, None], ids], stack.b, rhs_indices=at)
            scale = stack.scale.astype(z.dtype)[at][:, None, None]
            y = y + (scale * z).astype(y.dtype).reshape(y.shape)
        return y

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = super().as_linear(x)  # type: ignore[misc]
        rows = self.adapters.batch.rows
        if rows is None:
            return y
        if rows.only is not None:
            own = self.adapters.weights.get(rows.only)
            return y if own is None else y + (own.scale * ((x @ own.b.T) @ own.a.T)).astype(x.dtype)
        for stack in self.adapters.stacks:
            at = rows.places(stack.order)[rows.numbers]
            each = x.reshape(len(rows.names), -1, x.shape[-1])
            z = mx.gather_mm(each, stack.b.swapaxes(-1, -2), rhs_indices=at)
            z = mx.gather_mm(z, stack.a.swapaxes(-1, -2), rhs_indices=at)
            scale = stack.scale.astype(z.dtype)[at][:, None, None]
            y = y + (scale * z).astype(x.dtype).reshape(y.shape)
        return y


class _AdaptedGate(nn.Module):
    """Mixed into the class of a module that holds layers of experts: passes on, with the number of each
    expert, the number of the row's adapter."""

    adapters: LayerAdapters

    def __call__(self, x: mx.array, indices: mx.array, *rest: Any, **named: Any) -> Any:
        rows = self.adapters.batch.rows
        if rows is not None and rows.only is None:
            tokens = indices.size // indices.shape[-1] // len(rows.names)
            numbers = mx.repeat(rows.numbers, tokens).reshape(*indices.shape[:-1], 1)
            # Experts first, so that sorted numbers are sorted experts.
            indices = indices.astype(mx.uint32) * len(rows.distinct) + numbers
        return super().__call__(x, indices, *rest, **named)


class _AdaptedExperts(nn.Module):
    """Mixed into the class of a layer of experts."""

    adapters: LayerAdapters

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        rows = self.adapters.batch.rows
        if rows is None:
            plain: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return plain
        if rows.only is not None:
            return self._alone(x, indices, rows.only, sorted_indices)
        experts, numbers = indices // len(rows.distinct), indices % len(rows.distinct)
        y: mx.array = super().__call__(x, experts, sorted_indices=sorted_indices)
        for stack in self.adapters.stacks:
            at = rows.places(stack.order)[numbers]
            where = at * stack.a.shape[1] + experts
            z = mx.gather_mm(x, stack.a.flatten(0, 1).swapaxes(-1, -2), rhs_indices=where)
            z = mx.gather_mm(z, stack.b.flatten(0, 1).swapaxes(-1, -2), rhs_indices=where)
            scale = stack.scale.astype(z.dtype)[at][..., None, None]
            y = y + (scale * z).astype(x.dtype)
        return y

    def _alone(self, x: mx.array, indices: mx.array, name: str, sorted_indices: bool) -> mx.array:
        """As upstream's `LoRASwitchLinear`."""
        y: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
        own = self.adapters.weights.get(name)
        if own is None:
            return y
        gather = partial(mx.gather_mm, rhs_indices=indices, sorted_indices=sorted_indices)
        z = gather(gather(x, own.a.swapaxes(-1, -2)), own.b.swapaxes(-1, -2))
        return y + (own.scale * z).astype(x.dtype)


def kind_of(layer: object) -> str | None:
    """Return `linear`, `embedding` or `experts`; None: no adapter can change the layer."""
    # Subclasses may return several arrays, or share their weights: only the plain classes are known.
    if type(layer) in (nn.Linear, nn.QuantizedLinear) or isinstance(layer, _AdaptedLinear):
        return "linear"
    if type(layer) in (nn.Embedding, nn.QuantizedEmbedding) or isinstance(layer, _AdaptedEmbedding):
        return "embedding"
    return "experts" if type(layer).__name__ in _EXPERTS else None


_MIXINS = {"linear": _AdaptedLinear, "embedding": _AdaptedEmbedding, "experts": _AdaptedExperts}


@cache
def _adapted_class(mixin: Any, plain: Any) -> type:
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__})


class Adapters:
    """The adapters of a network: adds them to its layers and removes them."""

    def __init__(self, network: Any) -> None:
        """`network`: as `BatchEngine` gets it."""
        self.batch = AdapterBatch()
        self._network = getattr(network, "whole", network)
        self._layers: dict[str, LayerAdapters] = {}
        self._plain: dict[str, tuple[Any, type]] = {}
        """Layers with another class, each with its own one."""
        self.names: dict[str, int] = {}
        """The adapters, with their bytes."""

    @property
    def nbytes(self) -> int:
        return sum(self.names.values())

    def layers(self) -> dict[str, nn.Module]:
        """Return the layers that adapters may change, by path."""
        modules = dict(self._network.named_modules())
        text = "language_model." if "language_model" in self._network else ""
        found = {path: layer for path, layer in modules.items() if path.startswith(text)}
        has_images = self._network is not None and text and hasattr(self._network, "get_input_embeddings")
        kinds = {path: kind_of(layer) for path, layer in found.items()}
        return {
            path: layer
            for path, layer in found.items()
            if kinds[path] is not None
            # Images are embedded once for all adapters.
            and not (has_images and kinds[path] == "embedding")
            and (kinds[path] != "experts" or type(modules[path.rpartition(".")[0]]).__name__ in _GATES)
        }

    def add(self, name: str, weights: AdapterWeights) -> None:
        """Add an adapter, evaluated. Raises `AdapterError` if it changes a layer that cannot be changed."""
        assert name != NO_ADAPTER, "the base has no name"
        assert name not in self.names, "names of adapters are unique"
        layers = self.layers()
        if unknown := sorted(weights.keys() - layers.keys()):
            raise AdapterError(f"it changes {unknown[0]}, which is no layer of the model that can be changed")
        before = self._held()
        try:
            for path, own in weights.items():
                self._adapted(path, layers[path]).add(name, own)
            mx.eval([array for path in weights for array in self._layers[path].arrays])
            self.names[name] = self._held() - before
        finally:
            if name not in self.names:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove an adapter that no row uses. Unknown ones are no error."""
        self.names.pop(name, None)
        changed = [layer for layer in self._layers.values() if layer.remove(name)]
        self._layers = {path: layer for path, layer in self._layers.items() if layer.weights}
        if not self._layers:
            for layer, plain in self._plain.values():
                layer.__class__ = plain
                del layer.adapters
            self._plain.clear()
        mx.eval([array for layer in changed for array in layer.arrays])

    def _held(self) -> int:
        return sum(array.nbytes for layer in self._layers.values() for array in layer.arrays)

    def _adapted(self, path: str, layer: nn.Module) -> LayerAdapters:
        if path not in self._layers:
            self._layers[path] = LayerAdapters(self.batch, layer)
            kind = kind_of(layer)
            assert kind is not None, "layers() lists no others"
            self._mix(path, layer, _MIXINS[kind], self._layers[path])
            if kind == "experts":
                self._mix_gate(path.rpartition(".")[0])
        return self._layers[path]

    def _mix(self, path: str, layer: Any, mixin: type, adapters: LayerAdapters) -> None:
        if path not in self._plain:
            plain: Any = type(layer)
            self._plain[path] = layer, plain
            layer.__class__ = _adapted_class(mixin, plain)
        layer.adapters = adapters

    def _mix_gate(self, path: str) -> None:
        """Adapt a module with experts, and all its layers of experts: each must understand the numbers."""
        modules = dict(self._network.named_modules())
        gate = modules[path]
        if path not in self._plain:
            self._mix(path, gate, _AdaptedGate, LayerAdapters(self.batch, gate))
        for name, layer in gate.children().items():
            if kind_of(layer) == "experts" and f"{path}.{name}" not in self._plain:
                self._mix(f"{path}.{name}", layer, _AdaptedExperts, LayerAdapters(self.batch, layer))
