"""Adapters (LoRA and DoRA of linear layers): rows of one forward pass that use different ones.

The linear layers that adapters change get another class, whose call adds each row's low-rank product to the
product of the base weights, which is computed once for all rows. Their weights and names stay as they are.
Such a layer finds the rows of the current pass in `AdapterBatch`, which the engine sets around each forward
pass. In a pass without adapters, the plain layer runs.

A pass whose rows all use one adapter computes what upstream's layers compute. Otherwise, the weights of a
layer's adapters are stacked, padded with zeros to the largest rank, and gathered by row; place 0 has zeros
only, for rows that this layer does not change. Other layers are not changed: to tell the rows of tokens that
are sorted by expert, or of images embedded once for all, would take code in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.contract.adapters import AdapterError

NO_ADAPTER = ""
"""The adapter of a row that uses none."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What an adapter adds to a linear layer, in mlx-lm's layout.

    `a`, `b`: [inputs, rank] and [rank, outputs]. `magnitude`: DoRA's, [outputs]; None: LoRA.
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
        rank = max(part.a.shape[1] for part in parts)
        norms = None
        if dora := frozenset(names) & self.norms.keys():
            ones = mx.ones_like(self.norms[min(dora)])
            norms = mx.stack([ones, *(self.norms.get(name, ones) for name in names)])
        return Stack(
            order=tuple(names),
            a=_padded([part.a for part in parts], 1, rank),
            b=_padded([part.b for part in parts], 0, rank),
            scale=mx.array([0.0, *(part.scale for part in parts)], mx.float32),
            norms=norms,
            dora=dora,
        )

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that own memory."""
        return [array for stack in self.stacks for array in stack.arrays]


def _view(stack: Stack, place: int, own: LayerWeights) -> LayerWeights:
    """Return an adapter's weights in a stack, without the padding."""
    rank = own.a.shape[1]
    return replace(own, a=stack.a[place][:, :rank], b=stack.b[place][:rank])


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


def is_linear(layer: object) -> bool:
    """Return whether adapters can change a layer."""
    # Subclasses may return several arrays, or share their weights: only the plain classes are known.
    return type(layer) in (nn.Linear, nn.QuantizedLinear) or isinstance(layer, _AdaptedLinear)


def not_linear(path: str) -> AdapterError:
    """Return the error of an adapter that changes anything but a linear layer of the model."""
    return AdapterError(f"it changes {path}: adapters can change linear layers of the model only, no others")


@cache
def _adapted_class(plain: Any) -> type:
    return type(plain.__name__, (_AdaptedLinear, plain), {"__module__": plain.__module__})


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
        text = "language_model." if "language_model" in self._network else ""
        modules = self._network.named_modules()
        return {path: layer for path, layer in modules if path.startswith(text) and is_linear(layer)}

    def add(self, name: str, weights: AdapterWeights) -> None:
        """Add an adapter, evaluated. Raises `AdapterError` if it changes a layer that cannot be changed."""
        assert name != NO_ADAPTER, "the base has no name"
        assert name not in self.names, "names of adapters are unique"
        layers = self.layers()
        if unknown := sorted(weights.keys() - layers.keys()):
            raise not_linear(unknown[0])
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

    def _adapted(self, path: str, layer: Any) -> LayerAdapters:
        if path not in self._layers:
            self._layers[path] = LayerAdapters(self.batch, layer)
            if path not in self._plain:
                plain: Any = type(layer)
                self._plain[path] = layer, plain
                layer.__class__ = _adapted_class(plain)
            layer.adapters = self._layers[path]
        return self._layers[path]
