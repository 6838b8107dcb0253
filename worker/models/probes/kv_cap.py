"""Probe of capped KV caches: a model that upstream does not cap, or caps in another way, is refused at its
start."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from worker.contract.engine import ModelError
from worker.contract.kv_cap import KVCap
from worker.engine.caches.batch import RowCaches
from worker.engine.caches.capability_probe import REFUSALS, ProbeTarget, differences, first_sentence
from worker.engine.caches.capped import CappedKVCache, begin_decoding, cap_caches

_CAP = KVCap(8)
_PROMPT, _FOLLOWING = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 9, 7)
_DIFFERENCE_MAX = 0.01
"""Maximum difference, relative to the logits' spread: both caches hold the same tokens."""


def require_cappable(network: nn.Module, cap: KVCap, name: str) -> None:
    """Run a few tokens on capped caches and on upstream's rotating ones. Raises `ModelError` if upstream does
    not cap the model's caches, or if they differ."""
    if hasattr(network, "make_cache"):
        why = "the model chooses the caches of its layers itself, and mlx-lm ignores max_kv_size for it"
    else:
        why = _refusal(network)
    if why:
        raise ModelError(f"{name}: --max-kv-size {cap.max_size}: its KV caches cannot be capped: {why}.")


def _refusal(network: nn.Module) -> str:
    """Return why the model cannot run on capped caches; empty: it can."""
    layers = len(network.layers)
    theirs: RowCaches = [RotatingKVCache(max_size=_CAP.max_size, keep=_CAP.sinks) for _ in range(layers)]
    ours: RowCaches = [CappedKVCache(_CAP) for _ in range(layers)]
    try:
        expected, found = _run(network, theirs), _run(network, ours)
        furthest = float(mx.max(differences(found, expected)))
    except REFUSALS as error:
        return first_sentence(error).removesuffix(".")
    return "" if furthest <= _DIFFERENCE_MAX else "answers would differ from mlx-lm's"


def _run(network: nn.Module, caches: RowCaches) -> mx.array:
    """Return the logits after each token, [tokens, vocabulary]."""
    found = [network(mx.array([_PROMPT], mx.uint32), cache=caches)[0]]
    begin_decoding(caches)
    found += [network(mx.array([[token]], mx.uint32), cache=caches)[0] for token in _FOLLOWING]
    return mx.concatenate(found)


def capped(stage: ProbeTarget, cap: KVCap | None) -> ProbeTarget:
    """Return the network to probe, with a cap within reach of its prompts if it has one."""
    if cap is None:
        return stage
    cap_caches(stage.network, _CAP)
    return replace(stage, threshold=max(stage.threshold, _CAP.max_size))
