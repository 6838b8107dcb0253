"""Chip check: whether the GPU multiplies matrices correctly, compared with the CPU.

A wrong result here is not rounding: on chips of the M5 generation, some builds of MLX return unrelated
numbers for products of more than a few rows (mlx 3585), and float32 products with the precision of TF32 (mlx
3534). The products have the size from which these kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

SHAPE = (64, 3072, 12288)
"""Rows, inner size and columns of the products."""
_COMPARED = 48
"""Every so many columns are compared: the CPU is slow."""
_WRONG = 0.05
"""Difference, relative to the largest number of the product, beyond any rounding."""
_IMPRECISE = 1e-4
"""The same for float32."""
_GROUP = 64
_KERNELS = "reinstall MLX, or set MLX_METAL_GPU_ARCH=applegpu_g15, which avoids these kernels (mlx 3585)"
_TF32 = "set MLX_ENABLE_TF32=0 (mlx 3534)"

Weights = Sequence[mx.array]
"""[columns, inner]; quantized: packed, with scales and biases."""


def wrong_results(dtype: mx.Dtype, bits: int | None) -> list[str]:
    """Return what is wrong with this device's products, and what avoids it; empty on a CPU. `dtype`: of the
    activations. `bits`: of quantized weights; None: they are not quantized."""
    if mx.default_device() == mx.cpu:
        return []
    found = [compare(dtype, each) for each in dict.fromkeys((None, bits))]
    mx.clear_cache()
    return [why for why in found if why]


def multiply(left: mx.array, weights: Weights, bits: int | None) -> mx.array:
    """Multiply [rows, inner] by the transposed weights on the device."""
    if bits is None:
        return left @ weights[0].T
    packed, scales, biases = weights
    return mx.quantized_matmul(left, packed, scales, biases, group_size=_GROUP, bits=bits)


def compare(
    dtype: mx.Dtype,
    bits: int | None = None,
    multiply: Callable[[mx.array, Weights, int | None], mx.array] = multiply,
    shape: tuple[int, int, int] = SHAPE,
) -> str:
    """Return what is wrong with products of weights of this type; empty: nothing."""
    rows, inner, columns = shape
    left = mx.random.normal((rows, inner), key=mx.random.key(1)).astype(dtype)
    weights: Weights = (mx.random.normal((columns, inner), key=mx.random.key(2)).astype(dtype),)
    if bits is not None:
        weights = mx.quantize(weights[0], _GROUP, bits)
    found = multiply(left, weights, bits)[:, ::_COMPARED].astype(mx.float32)
    some = [each[::_COMPARED] for each in weights]
    right = some[0] if bits is None else mx.dequantize(some[0], some[1], some[2], _GROUP, bits)
    with mx.stream(mx.cpu):
        expected = left.astype(mx.float32) @ right.astype(mx.float32).T
        difference = float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected)))
    return _told(dtype, difference, bits)


def _told(dtype: mx.Dtype, difference: float, bits: int | None) -> str:
    name = str(dtype).rpartition(".")[2]
    kind = name if bits is None else f"{bits}-bit"
    if not difference <= _WRONG:
        return f"{kind} matrix products are wrong on this device: {_KERNELS}"
    if dtype == mx.float32 and bits is None and difference > _IMPRECISE:
        return f"float32 matrix products are imprecise on this device: {_TF32}"
    return ""
