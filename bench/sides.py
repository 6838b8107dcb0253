"""The sides compared in process. Each takes the same requests and runs until a number of tokens is generated.

`Bare` is the upper bound: the model with one token a row on upstream's merged caches, argmax, one step ahead,
and nothing else. `Upstream` is `mlx_lm.generate.BatchGenerator`, `Alone` its `stream_generate`. Ours is in
`bench.ours`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from bench.timing import Work, timed
from worker.values import SamplingParams

GREEDY = SamplingParams()
PREFILL_ROWS = 8
"""The number of prompts that upstream's generator prefills at once by default."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt tokens, maximum number of output tokens, and sampling parameters."""

    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY


class Side(Protocol):
    """An engine that answers requests."""

    def submit(self, asks: Sequence[Ask]) -> None:
        """Queue requests; nothing is run."""

    def run(self, tokens: int) -> int:
        """Run until at least `tokens` more tokens are generated; return their number."""

    def close(self) -> None:
        """Drop all requests."""


def measured(side: Side, tokens: int, asks: Sequence[Ask] = ()) -> Work:
    """Measure `tokens` tokens of `side`. Work that it has dispatched is completed at the end, so no side
    gains a step."""

    def work() -> int:
        side.submit(asks)
        done = side.run(tokens)
        mx.synchronize()
        mx.synchronize(generation_stream)
        return done

    return timed(work)


def prefilled(network: Any, tokens: Sequence[int], chunk: int = 512) -> list[Any]:
    """Return upstream's own caches of one row that has prefilled `tokens`."""
    caches: list[Any] = make_prompt_cache(network)
    for at in range(0, len(tokens), chunk):
        network(mx.array([list(tokens[at : at + chunk])]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


class Bare:
    """A fixed batch that decodes greedily without end. A single row keeps its own caches."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def submit(self, asks: Sequence[Ask]) -> None:
        """Prefill the requests of the first call; later calls must be empty."""
        if not asks:
            return
        rows = [prefilled(self._network, ask.tokens[:-1]) for ask in asks]
        layers = [list(layer) for layer in zip(*rows, strict=True)]
        self._caches = rows[0] if len(rows) == 1 else [layer[0].merge(layer) for layer in layers]
        self._pending = mx.array([ask.tokens[-1] for ask in asks])

    def run(self, tokens: int) -> int:
        done = 0
        while done < tokens:
            drawn = mx.argmax(self._network(self._pending[:, None], cache=self._caches)[:, -1, :], axis=-1)
            mx.async_eval(drawn)
            done += len(cast("list[int]", self._pending.tolist()))
            self._pending = drawn
        return done

    def close(self) -> None:
        self._caches, self._pending = [], mx.array([])


class Upstream:
    """`BatchGenerator`. Counts tokens and stores none."""

    def __init__(self, network: Any, rows_max: int) -> None:
        self._generator: Any = BatchGenerator(
            network, completion_batch_size=rows_max, prefill_batch_size=min(rows_max, PREFILL_ROWS)
        )
        self._uids: list[int] = []

    def submit(self, asks: Sequence[Ask]) -> None:
        if not asks:
            return
        self._uids += self._generator.insert(
            [list(ask.tokens) for ask in asks],
            max_tokens=[ask.max_tokens for ask in asks],
            samplers=[sampler_of(ask.sampling) for ask in asks],
            logits_processors=[processors_of(ask.sampling) for ask in asks],
        )

    def run(self, tokens: int) -> int:
        done = 0
        while done < tokens:
            _, drawn = self._generator.next()
            done += len(drawn)
        return done

    def close(self) -> None:
        self._generator.remove(self._uids)
        self._generator.close()


class Alone:
    """`stream_generate`, one request after another."""

    def __init__(self, network: Any, tokenizer: Any) -> None:
        self._network, self._tokenizer = network, tokenizer
        self._asks: list[Ask] = []
        self._answers = self._answer()

    def _answer(self) -> Iterator[int]:
        while self._asks:
            ask = self._asks.pop(0)
            for _ in stream_generate(
                self._network, self._tokenizer, list(ask.tokens), max_tokens=ask.max_tokens
            ):
                yield 1

    def submit(self, asks: Sequence[Ask]) -> None:
        """Queue requests; decoding is greedy only."""
        if asks and not self._asks:
            self._answers = self._answer()
        self._asks += asks

    def run(self, tokens: int) -> int:
        return sum(next(self._answers) for _ in range(tokens))

    def close(self) -> None:
        self._asks.clear()


def sampler_of(sampling: SamplingParams) -> Any:
    """Return upstream's sampler for the same parameters; None for greedy, for which upstream uses its own."""
    if sampling.temperature == 0:
        return None
    return make_sampler(
        temp=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k
    )


def processors_of(sampling: SamplingParams) -> list[Any]:
    """Return upstream's processors for the same penalties and bias."""
    processors: list[Any] = make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
    )
    return processors
