"""Masks of capped caches: each token attends to the positions that it attends to in upstream's cache."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from worker.contract.kv_cap import KVCap
from worker.engine.caches.capped import CappedKVCache

CAPS = st.builds(KVCap, max_size=st.integers(8, 40), step=st.integers(2, 50))


def feed(cache: Any, first: int, last: int) -> list[set[int]]:
    """Feed positions `first` to before `last` as keys, and return which of them each attends to."""
    mask = cache.make_mask(last - first)
    keys, _ = cache.update_and_fetch(*[mx.arange(first, last)[None, None, :, None].astype(mx.float32)] * 2)
    columns: Any = keys[0, 0, :, 0].tolist()
    positions = [int(column) for column in columns]
    if isinstance(mask, mx.array):
        rows: Any = mask.tolist()
        return [{at for at, seen in zip(positions, row, strict=True) if seen} for row in rows]
    return [{at for at in positions if mask is None or at <= asking} for asking in range(first, last)]


@settings(max_examples=60, deadline=None)
@given(cap=CAPS, prompt=st.integers(1, 150), seed=st.integers(0, 10**6))
def test_tokens_attend_to_what_they_attend_to_in_upstreams_steps(cap: KVCap, prompt: int, seed: int) -> None:
    """However the prompt is cut, and wherever after its switch a preempted row resumes."""
    rng, theirs = random.Random(seed), RotatingKVCache(max_size=cap.max_size, keep=cap.sinks)
    right: list[set[int]] = []
    while len(right) < prompt - 1:
        right += feed(theirs, len(right), min(len(right) + cap.step, prompt - 1))
    end = prompt + 60
    while len(right) < end:
        right += feed(theirs, len(right), len(right) + 1)

    ours, found, switch = CappedKVCache(cap), list[set[int]](), cap.switch(prompt)
    resumed = rng.randint(prompt, end)
    while len(found) < end:
        begin = len(found)
        if begin == switch:
            ours.decode_from = begin
        last = min(begin + rng.choice((1, rng.randint(1, 60))), resumed) if begin < resumed else begin + 1
        found += feed(ours, begin, min(last, switch) if begin < switch else last)
    assert found == right
