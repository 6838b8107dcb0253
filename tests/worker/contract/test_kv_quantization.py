"""Where rows are quantized: the positions at which upstream's `generate_step` quantizes its caches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.worker_settings import WorkerSettings
from worker.contract.kv_quantization import NEVER, KVQuantization, kv_quantization_of

SETTINGS = st.builds(
    KVQuantization, bits=st.just(8), group_size=st.just(64), start=st.integers(0, 80), step=st.integers(1, 20)
)
PROMPTS = st.integers(1, 120)


def upstream_switch(prompt_tokens: int, kv: KVQuantization) -> int:
    """Follow upstream's loop: what holds `start` tokens after a call of the model is quantized."""
    held = 0
    while prompt_tokens - held > 1:
        held += min(kv.step, prompt_tokens - held - 1)
        if held >= kv.start:
            return held
    while True:
        held += 1
        if held >= kv.start:
            return held


@given(PROMPTS, SETTINGS)
def test_a_row_is_quantized_where_upstream_quantizes_it(prompt_tokens: int, kv: KVQuantization) -> None:
    switch = kv.switch(prompt_tokens)
    assert switch == upstream_switch(prompt_tokens, kv)
    assert 1 <= switch <= max(kv.switch_max, prompt_tokens)


@given(PROMPTS, PROMPTS, SETTINGS)
def test_rows_share_only_what_was_computed_alike(one: int, other: int, kv: KVQuantization) -> None:
    common = min(kv.shared_upto(one), kv.shared_upto(other), 200)
    assert min(kv.switch(one), common) == min(kv.switch(other), common)


@given(SETTINGS)
def test_long_prompts_share_everything(kv: KVQuantization) -> None:
    assert kv.shared_upto(kv.switch_max + 1) == kv.shared_upto(kv.switch_max + 50) == NEVER


def test_upstreams_defaults() -> None:
    kv = kv_quantization_of(WorkerSettings(kv_bits=8))
    assert kv == KVQuantization(bits=8, group_size=64, start=5000, step=2048)
    assert [kv.switch(prompt) for prompt in (1, 5000, 5001, 6000, 6145, 9000)] == [
        5000,
        5000,
        5000,
        5999,
        6144,
        6144,
    ]
    assert kv_quantization_of(WorkerSettings()) is None
