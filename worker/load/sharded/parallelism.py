"""Tensor and pipeline parallelism: one model sharded over several processes (*ranks*) by MLX's collectives.

All ranks do the same in the same order, each with its shard: if one rank does not compute something, all
others wait for it. So every call of a `ShardNetwork` starts its evaluation before it returns. Decisions that
could differ between ranks are agreed on: batching capabilities, sampled tokens, memory.

Tensor parallelism gives each rank a part of every layer, a pipeline gives it some of the layers. Upstream
implements both per family (`shard`, `pipeline`); families without are refused.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_model

from protocol.hosts import Backend, Mode
from worker.interfaces import ModelError
from worker.load.config import rope_overrides
from worker.runner.kv.batch import RowCaches, leaf_caches
from worker.runner.trees import arrays_of

log = logging.getLogger(__name__)

PREFERRED: dict[Backend, Mode] = {"ring": "pipeline", "jaccl": "tensor"}
"""Default split by backend. Tensor parallelism synchronizes twice per layer: too slow without RDMA."""
JOIN_S_MAX = 30.0
"""Timeout of joining in seconds, once all ranks are known to be running."""

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


class ShardNetwork(nn.Module):
    """A rank's shard of a network, called like the whole network: every rank gets all logits."""

    def __init__(self, part: nn.Module) -> None:
        initialize: Any = super().__init__  # which MLX leaves without types
        initialize()
        self.part = part

    @property
    def layers(self) -> Any:
        return self.part.layers

    def make_cache(self) -> RowCaches:
        """Return empty caches of a row for this rank's layers."""
        caches: RowCaches = make_prompt_cache(self.part)
        return caches

    def __call__(self, tokens: mx.array, cache: RowCaches) -> mx.array:
        """Logits, [rows, tokens, vocabulary]. `tokens` is [rows, tokens]."""
        logits: mx.array = self.part(tokens, cache=cache)
        # Logits of prompts are large and not needed; evaluating the caches includes what is sent.
        mx.async_eval(logits if tokens.shape[1] == 1 else [layer.state for layer in cache])
        return logits


class ShardGroup:
    """This process as one of the ranks. Used by the model thread only; call `join` first."""

    def __init__(self, backend: Backend, requested_mode: Mode | None) -> None:
        """`requested_mode`: how to split the model; None: by backend and family."""
        self.backend: Backend = backend
        self.mode: Mode | None = requested_mode
        self._requested_mode = requested_mode
        self._group: Any = None
        self.rank, self.size = 0, 1
        self.parameters = 0
        """Parameters of the whole network, once a shard of it is open."""

    def join(self) -> None:
        """Join the other ranks, which must be running. Raises `ModelError` if the backend does not work.

        Upstream waits forever while holding the GIL, so a watchdog ends the process.
        """
        faulthandler.dump_traceback_later(JOIN_S_MAX, exit=True)
        try:
            self._group = mx.distributed.init(strict=True, backend=self.backend)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the ranks cannot be joined by {self.backend} ({_line(error)}).") from None
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.rank, self.size = self._group.rank(), self._group.size()

    # --- the network ---

    def open(self, folder: Path) -> ShardNetwork:
        """Open this rank's shard of a network; no weights are read. Raises `ModelError` if it cannot be
        split, and whatever upstream raises if it cannot be opened."""
        network, config = load_model(folder, lazy=True, model_config=rope_overrides(folder))
        self.parameters = int(get_total_parameters(network))
        self.mode = self._mode_for(network, str(config.get("model_type")))
        if self.mode == "tensor":
            self._require_whole_heads(config)
        try:
            if self.mode == "tensor":
                network.shard(self._group)
            else:
                network.model.pipeline(self._group)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ModelError(
                f"it cannot be split by {self.mode} over {self.size} ({_line(error)}). Name fewer hosts."
            ) from None
        return ShardNetwork(network)

    def _mode_for(self, network: Any, family: str) -> Mode:
        able = modes_of(network)
        if not able:
            raise ModelError(
                f"mlx-lm cannot split the family {family!r}. Run it on one machine, more strongly quantized"
                " if need be, or choose a model of a family that it can."
            )
        wanted = self._requested_mode or PREFERRED[self.backend]
        if wanted in able:
            return wanted
        if self._requested_mode is not None:
            raise ModelError(f"mlx-lm cannot split the family {family!r} by {wanted}. Use --split {able[0]}.")
        log.info("split by %s: mlx-lm cannot split the family %r by %s", able[0], family, wanted)
        return able[0]

    def _require_whole_heads(self, config: dict[str, Any]) -> None:
        """Require evenly divisible head counts: upstream would continue with zero or fractional heads."""
        text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), config)
        latent = "kv_lora_rank" in text  # latent attention has no key-value heads
        for key in _HEADS:
            count = text.get(key)
            if isinstance(count, int) and count % self.size and not (latent and "key_value" in key):
                raise ModelError(
                    f"its {count} heads ({key}) cannot be split over {self.size} ranks. Name as many hosts as"
                    " divide them, or use --split pipeline."
                )

    # --- agreement between ranks ---

    def gather(self, value: int) -> list[int]:
        """All-gather: return each rank's value by rank. Waits for all ranks."""
        told: Any = mx.distributed.all_gather(mx.array([value], mx.int64), group=self._group).tolist()
        return [int(each) for each in told]

    def agreed(self, verdict: bool) -> bool:
        """Return whether `verdict` is true on all ranks. Waits for all ranks."""
        return all(self.gather(int(verdict)))

    def is_alike(self, network: nn.Module) -> bool:
        """Return whether all ranks have the same kinds of caches; then probes have the same results on all.
        Waits for all ranks."""
        kinds = sorted({_kind(cache) for cache in leaf_caches(make_prompt_cache(network))})
        return len(set(self.gather(zlib.crc32(json.dumps(kinds).encode())))) == 1

    def drawn(self, tokens: mx.array) -> mx.array:
        """Broadcast the first rank's tokens, lazily: different chips round differently."""
        mine = tokens if self.rank == 0 else mx.zeros_like(tokens)
        shared: mx.array = mx.distributed.all_sum(mine, group=self._group)
        return shared

    def fitting(self, left: int, cost: int) -> int:
        """Return the cache bytes that fit on every rank, in terms of the first rank's caches. `left`: free
        bytes on this rank. `cost`: bytes of a sample row on this rank. Waits for all ranks."""
        lefts, costs = self.gather(left), self.gather(max(1, cost))
        return min(there * costs[0] // each for there, each in zip(lefts, costs, strict=True))


def weight_bytes(network: Any) -> int:
    """Return the bytes of all parameters, whether or not they have been read."""
    return sum(parameter.nbytes for parameter in arrays_of(network.parameters()).values())


def modes_of(network: Any) -> list[Mode]:
    """Return how upstream can split a network, checked as in its own loader."""
    able: list[tuple[Mode, bool]] = [
        ("tensor", hasattr(network, "shard")),
        ("pipeline", hasattr(getattr(network, "model", None), "pipeline")),
    ]
    return [mode for mode, can in able if can]


def _kind(cache: Any) -> tuple[str, int]:
    return type(cache).__name__, int(getattr(cache, "max_size", None) or 0)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
