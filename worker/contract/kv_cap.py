"""Capped KV caches: which tokens of a row are computed as tokens of a prompt, and which as its answer. Pure.

Upstream's `generate_step(max_kv_size=…)` keeps the first tokens, the attention *sinks*, and the last ones. A
token that it runs alone attends to both, `max_size` tokens in all. Tokens of a prompt run in steps of `step`
tokens and attend to a sliding window of `max_size`; only the first tokens of a step also attend to sinks. So
what is computed of a token depends on how upstream would have run it. Rows compute every token that way,
however their prompts are cut into chunks. The *switch* is the position of the first one that attends as an
answer's; tokens before the cap attend to all others either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.worker_settings import WorkerSettings
from worker.contract.kv_quantization import UPSTREAM_STEP


@dataclass(frozen=True, slots=True)
class KVCap:
    """`max_size`: tokens in each layer's cache, of which the first `sinks` are never dropped. `step`:
    upstream's prefill step in tokens."""

    max_size: int
    sinks: int = 4
    step: int = UPSTREAM_STEP

    def switch(self, prompt_tokens: int) -> int:
        """Return the position from which on tokens of a row attend as those of an answer, at least 1."""
        prefilled = prompt_tokens - 1
        runs_last_alone = prefilled > 1 and prefilled % self.step == 1
        return max(prefilled - runs_last_alone, self.max_size)

    def shared_upto(self, prompt_tokens: int) -> int:
        """Return up to which position a row's caches are equal to those of any other row with its tokens."""
        return self.switch(prompt_tokens)


def kv_cap_of(settings: WorkerSettings) -> KVCap | None:
    """Return how a worker caps KV caches; None: it does not."""
    return None if settings.max_kv_size is None else KVCap(settings.max_kv_size)
