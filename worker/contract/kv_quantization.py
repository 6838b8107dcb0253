"""KV cache quantization: from which position on a row's KV cache is quantized. Pure.

Upstream's `generate_step` runs all tokens of a prompt but the last in steps of `step` tokens, and then one
token at a time. After each of these it quantizes the cache, once it holds at least `start` tokens. Up to that
position, the *switch*, every token is computed on exact keys and values; behind it, each token is quantized
as it is written and attends to quantized keys only. So what a token's keys are depends on the switch, and the
switch depends on the length of the prompt.

Rows switch exactly there, however their prompts are cut into chunks. Prompts that end behind `switch_max`
all switch there, as do those that reach `start` in their output if that is the same position. Their prefixes
are stored and reused without a limit. Other rows share with others only what lies before their switch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from protocol.worker_settings import WorkerSettings

NEVER = sys.maxsize
"""Switch of a row that stays exact, and the limit of rows without one."""
UPSTREAM_STEP = 2048
"""Upstream's default prefill step in tokens."""


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """`bits` per value in groups of `group_size`, with a scale and a bias each, from `start` tokens on.
    `step`: upstream's prefill step in tokens."""

    bits: int
    group_size: int = 64
    start: int = 5000
    step: int = UPSTREAM_STEP

    @property
    def switch_max(self) -> int:
        """The switch of every prompt that is longer: the highest switch within a prompt."""
        return max(1, -(-self.start // self.step)) * self.step

    def switch(self, prompt_tokens: int) -> int:
        """Return the number of tokens, at least 1, with which a row's cache is quantized."""
        prefilled = prompt_tokens - 1
        if max(self.start, 1) <= prefilled:
            return min(self.switch_max, prefilled)
        return max(self.start, prompt_tokens)

    def shared_upto(self, prompt_tokens: int) -> int:
        """Return up to which position a row's caches are equal to those of any other row with its tokens."""
        switch = self.switch(prompt_tokens)
        return NEVER if switch == self.switch_max else switch


def kv_quantization_of(settings: WorkerSettings) -> KVQuantization | None:
    """Return how a worker quantizes KV caches; None: it does not."""
    if settings.kv_bits is None:
        return None
    return KVQuantization(settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start)
