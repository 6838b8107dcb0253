"""Chunked prefill of gated delta layers where they have no fused kernel.

Without Metal, mlx-lm runs these layers token by token. mlx-vlm has the same recurrence in chunks, as matrix
products (Yang et al., 2024, "Gated Delta Networks"); its results differ by rounding only.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import gated_delta

CHUNK_TOKENS = 16
"""Tokens in a chunk. On a CPU mlx-vlm's own choice, 64, takes 1.3 to 2.5 times as long. Shorter passes, such
as those that verify drafts, go token by token, so that they give what single steps give."""

_by_token = gated_delta.gated_delta_ops


def install_chunked() -> None:
    """Let mlx-lm's gated delta layers run prompts in chunks. Does nothing with Metal, which has a kernel."""
    if not mx.metal.is_available():
        gated_delta.gated_delta_ops = chunked


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return outputs, [rows, tokens, heads, width], and the last state, as mlx-lm's `gated_delta_ops` does.
    Gates of each channel, [rows, tokens, heads, width], have no chunked form."""
    outputs: tuple[mx.array, mx.array]
    if q.shape[1] < CHUNK_TOKENS or g.ndim == 4:
        outputs = _by_token(q, k, v, g, beta, state, mask)
        return outputs
    # Imported here because this takes half a second, which models without such layers need not wait for.
    from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_chunked

    outputs = gated_delta_chunked(q, k, v, g, beta, state, mask, C=CHUNK_TOKENS)
    return outputs
