"""One model split over several processes, its *ranks*, by upstream's collectives.

All ranks do the same, in the same order, each with its part of the network: what one of them does not ask
for, all others wait for. So every call of a `PartNetwork` sets out to compute what it needs of the others
before it returns, and whatever ranks could judge differently is agreed on: what rows can do, who draws, what
fits.

A tensor split gives each rank a part of every layer, a pipeline some of the layers; upstream's families know
how (`shard`, `pipeline`), or they do not, and are refused.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_model

from protocol.hosts import Backend, Mode
from worker.contract import ModelError
from worker.engine.caches.batch import RowCaches, leaf_caches
from worker.engine.hearing import Tap
from worker.engine.trees import arrays_of

log = logging.getLogger(__name__)

PREFERRED: dict[Backend, Mode] = {"ring": "pipeline", "jaccl": "tensor"}
"""Tensor parallelism waits for the others twice in each layer: too dear but over RDMA."""
JOIN_S_MAX = 30.0
"""What joining takes at the most once all ranks are known to be there."""

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


class PartNetwork(nn.Module):
    """A rank's part of a network, called as the whole one: every rank gets all of the logits."""

    def __init__(self, part: nn.Module) -> None:
        initialize: Any = super().__init__  # which MLX leaves without types
        initialize()
        self.part = part
        self._tap: Tap | None = None

    def listen(self, tap: Tap | None) -> None:
        """What comes by at `tap` is computed with each pass: on all ranks, for whoever of them uses it."""
        self._tap = tap

    @property
    def layers(self) -> Any:
        return self.part.layers

    def make_cache(self) -> RowCaches:
        """Empty caches of a row, of the layers that this rank has."""
        caches: RowCaches = make_prompt_cache(self.part)
        return caches

    def __call__(self, tokens: mx.array, cache: RowCaches) -> mx.array:
        """Logits, [rows, tokens, vocabulary]. `tokens` is [rows, tokens]."""
        logits: mx.array = self.part(tokens, cache=cache)
        # Of prompts nobody wants the logits, which are large; their caches are tied to what is sent.
        wanted = logits if tokens.shape[1] == 1 else [layer.state for layer in cache]
        mx.async_eval(wanted, [] if self._tap is None else self._tap.last)
        return logits


class Split:
    """This process as one of the ranks. Used by the thread that runs the model, `join` before all else."""

    def __init__(self, backend: Backend, asked: Mode | None) -> None:
        """`asked`: how the model is to be split; None: as the backend and the family like."""
        self.backend: Backend = backend
        self.mode: Mode | None = asked
        self._asked = asked
        self._group: Any = None
        self.rank, self.size = 0, 1
        self.parameters = 0
        """Of the whole network, once a part of it is there."""

    def join(self) -> None:
        """Meet the other ranks, who must be there. Raises `ModelError` where the backend does not work.

        Upstream waits for ever, and no other thread runs meanwhile: so a watchdog ends the process.
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

    def open(self, folder: Path, look: Callable[[nn.Module], None] | None = None) -> PartNetwork:
        """This rank's part of a folder's network, its weights not read yet. `look` is shown the whole. Raises
        `ModelError` for one that cannot be split, and one of many errors for one that cannot be opened."""
        network, config = load_model(folder, lazy=True)
        if look is not None:
            look(network)
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
        return PartNetwork(network)

    def _mode_for(self, network: Any, family: str) -> Mode:
        able = modes_of(network)
        if not able:
            raise ModelError(
                f"mlx-lm cannot split the family {family!r}. Run it on one machine, more strongly quantized"
                " if need be, or choose a model of a family that it can."
            )
        wanted = self._asked or PREFERRED[self.backend]
        if wanted in able:
            return wanted
        if self._asked is not None:
            raise ModelError(f"mlx-lm cannot split the family {family!r} by {wanted}. Use --split {able[0]}.")
        log.info("split by %s: mlx-lm cannot split the family %r by %s", able[0], family, wanted)
        return able[0]

    def _require_whole_heads(self, config: dict[str, Any]) -> None:
        """Upstream would go on with none, or with halves."""
        text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), config)
        latent = "kv_lora_rank" in text  # then keys and values have no heads of their own
        for key in _HEADS:
            count = text.get(key)
            if isinstance(count, int) and count % self.size and not (latent and "key_value" in key):
                raise ModelError(
                    f"its {count} heads ({key}) cannot be split over {self.size} ranks. Name as many hosts as"
                    " divide them, or use --split pipeline."
                )

    # --- what the ranks agree on ---

    def gather(self, value: int) -> list[int]:
        """What each rank says, in their order. Waits for all."""
        told: Any = mx.distributed.all_gather(mx.array([value], mx.int64), group=self._group).tolist()
        return [int(each) for each in told]

    def agreed(self, verdict: bool) -> bool:
        """Whether all ranks say so. Waits for all."""
        return all(self.gather(int(verdict)))

    def is_alike(self, network: nn.Module) -> bool:
        """Whether the layers of all ranks keep caches of the same kinds: then what is tried on one comes out
        alike on all. Waits for all."""
        kinds = sorted({_kind(cache) for cache in leaf_caches(make_prompt_cache(network))})
        return len(set(self.gather(zlib.crc32(json.dumps(kinds).encode())))) == 1

    def drawn(self, tokens: mx.array) -> mx.array:
        """The first rank's tokens, lazily: chips that differ round differently."""
        mine = tokens if self.rank == 0 else mx.zeros_like(tokens)
        shared: mx.array = mx.distributed.all_sum(mine, group=self._group)
        return shared

    def fitting(self, left: int, cost: int) -> int:
        """Of the bytes that the caches of all rows may take, as the first rank counts them, those that every
        rank has. `left`: what there is here; `cost`: of some row, here. Waits for all."""
        lefts, costs = self.gather(left), self.gather(max(1, cost))
        return min(there * costs[0] // each for there, each in zip(lefts, costs, strict=True))


def weight_bytes(network: Any) -> int:
    """Of all parameters, whether or not they have been read."""
    return sum(parameter.nbytes for parameter in arrays_of(network.parameters()).values())


def modes_of(network: Any) -> list[Mode]:
    """How upstream can split a network; as its own loader finds out."""
    able: list[tuple[Mode, bool]] = [
        ("tensor", hasattr(network, "shard")),
        ("pipeline", hasattr(getattr(network, "model", None), "pipeline")),
    ]
    return [mode for mode, can in able if can]


def _kind(cache: Any) -> tuple[str, int]:
    return type(cache).__name__, int(getattr(cache, "max_size", None) or 0)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
