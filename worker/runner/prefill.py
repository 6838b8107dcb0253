"""Prefill: runs prompts in chunks, each row in caches of its own.

Several prompts run in one call where the model allows it. With the last chunk of a prompt its last token may
be fed along: the row's first token is then sampled from the logits behind it, without a forward pass of its
own. The output head reads that one position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.runner.drafters.mtp import HiddenStateProposer
from worker.runner.kv.batch import RowCaches, prefill_abreast
from worker.runner.kv.capability_probe import BatchCapabilities
from worker.runner.kv.single import reserve
from worker.runner.kv.sparse_rows import skipping
from worker.runner.lora import AdapterBatch
from worker.runner.rows import EngineRow
from worker.runner.sampling.logprobs import piece_tokens, prefill_scored
from worker.runner.vision import RowImages
from worker.values import EncodedImage, Logprob, LogprobTargets

Chunks = Mapping[str, Sequence[int]]


class PrefillRunner:
    """The passes over the prompts of an engine's rows."""

    def __init__(
        self,
        model: nn.Module,
        rows: dict[str, EngineRow],
        fresh: Callable[[], RowCaches],
        adapters: AdapterBatch,
        mtp: HiddenStateProposer | None,
        images: RowImages,
    ) -> None:
        """`rows`: the engine's, by name. `fresh`: makes empty caches of a row. `mtp`: the
        drafter that reads hidden states, if any."""
        self._rows = rows
        self._model = model
        self._head = OutputHead(model)
        self._fresh = fresh
        self._adapters = adapters
        self.mtp = mtp
        self._images = images
        self._piece_tokens = 0
        """Positions in one piece of a scored prompt; 0: not computed yet."""

    def row(self, name: str) -> EngineRow:
        """Return a row; a new one if it is unknown."""
        if name not in self._rows:
            self._rows[name] = EngineRow(name, self._fresh())
        return self._rows[name]

    def run(
        self,
        chunks: Chunks,
        targets: Mapping[str, LogprobTargets],
        last: Mapping[str, int],
        embeddings: Mapping[str, EncodedImage],
        able: BatchCapabilities,
    ) -> Mapping[str, Sequence[Logprob]]:
        """Run the chunks, as `Engine.prefill`. `able`: what the model's rows support. A row with targets is
        run by itself."""
        rows = {name: self.row(name) for name in chunks}
        plain: dict[str, Sequence[int]] = {}
        for name, tokens in chunks.items():
            if name in targets:
                continue
            if self._images.has(name):
                self._run_images(name, len(tokens), embeddings)
            else:
                plain[name] = [*tokens, last[name]] if name in last else tokens
        self._run_plain(plain, last, able)
        for name, row in rows.items():
            if row.tokens + len(chunks[name]) < row.expected:
                reserve(row.caches, row.expected)
        silent = [row for name, row in rows.items() if name not in targets]
        ended = [row.logits for row in silent if row.logits is not None]
        mx.eval(ended, [cache.state for row in silent for cache in row.caches])
        likelihoods = {name: self._run_scored(name, chunks[name], asked) for name, asked in targets.items()}
        for name, row in rows.items():
            row.tokens += len(chunks[name])
        return likelihoods

    def _run_images(self, name: str, tokens: int, embeddings: Mapping[str, EncodedImage]) -> None:
        with self._adapters.applied([self._rows[name].adapter]):
            self._images.prefill(name, tokens, self._rows[name].caches, embeddings)
        if self.mtp is not None:
            self.mtp.skip(name, tokens)

    def _run_plain(self, chunks: Chunks, last: Mapping[str, int], able: BatchCapabilities) -> None:
        """Run chunks of rows without images, lazily."""
        if self._may_run_together(chunks, able):
            self._run_together(chunks, last)
            return
        for name, tokens in chunks.items():
            caches = self._rows[name].caches
            with self._adapters.applied([self._rows[name].adapter]):
                self._pass({name: tokens}, last, mx.array([list(tokens)], mx.uint32), cache=caches)
            if self.mtp is not None:
                self.mtp.on_hidden_states([name], [len(tokens)])

    def _may_run_together(self, chunks: Chunks, able: BatchCapabilities) -> bool:
        """Whether the rows of these chunks are at one position, and may be run in one call from there."""
        rows = [self._rows[name] for name in chunks]
        if len(rows) < 2 or len({row.tokens for row in rows}) > 1:
            return False
        return able.abreast if rows[0].tokens else able.padded

    def _run_together(self, chunks: Chunks, last: Mapping[str, int]) -> None:
        run = partial(self._pass, chunks, last)
        with self._adapters.applied([self._rows[name].adapter for name in chunks]):
            after = prefill_abreast(run, chunks, {name: self._rows[name].caches for name in chunks})
        for name, caches in after.items():
            self._rows[name].caches = caches
        if self.mtp is not None:
            self.mtp.on_hidden_states(list(chunks), [len(tokens) for tokens in chunks.values()])

    def _pass(self, chunks: Chunks, last: Mapping[str, int], tokens: mx.array, cache: RowCaches) -> None:
        """Run a forward pass over `tokens`, the padded chunks; keep the logits of the rows in `last`."""
        if not chunks.keys() & last.keys():
            self._model(tokens, cache=cache)
            return
        logits = self._head.last_logits(tokens, [len(chunk) for chunk in chunks.values()], cache=cache)
        for place, name in enumerate(chunks):
            if name in last:
                self._rows[name].logits = logits[place : place + 1]

    def _run_scored(self, name: str, tokens: Sequence[int], asked: LogprobTargets) -> list[Logprob]:
        self._piece_tokens = self._piece_tokens or piece_tokens(self._model)
        if self.mtp is not None:
            self.mtp.skip(name, len(tokens))
        row = self._rows[name]
        with self._adapters.applied([row.adapter]):
            return prefill_scored(self._model, tokens, row.caches, asked, self._piece_tokens)

    def skip_tokens(self, name: str, first: int, last: int) -> None:
        row = self.row(name)
        row.caches = skipping(row.caches, first, last)
        if self.mtp is not None:
            self.mtp.skip(name, last - first)

    def fork(self, name: str, copy: str) -> None:
        if name in self._rows and not self._rows[name].length:
            self._rows[copy] = replace(deepcopy(self._rows[name]), name=copy)
        self._images.copy(name, copy)
        if self.mtp is not None:
            self.mtp.copy(name, copy)


_LINEAR = (nn.Linear, nn.QuantizedLinear)
_HEADS = ("lm_head", "embed_out")
"""Upstream's names that only heads with weights of their own have; most others are the embedding's
`as_linear`. One of another name makes the logits of all positions."""


class OutputHead:
    """The output head of one model, which is looked for when it is first used."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def last_logits(self, tokens: mx.array, counts: Sequence[int], **inputs: Any) -> mx.array:
        """Run a forward pass; return the logits behind each row's last token, [rows, vocabulary], lazily.

        `tokens`: [rows, width], padded on the right; `counts`: tokens of each row. `inputs`: as the model's.
        """
        with self._reading(counts):
            logits: mx.array = self._model(tokens, **inputs)
        # A head that was not found has made those of all positions.
        return (logits if logits.shape[1] == 1 else _last(logits, counts))[:, 0]

    @cached_property
    def _own(self) -> list[tuple[Any, str]]:
        """The heads with weights of their own, by their owners."""
        owners = self._model.modules()
        return [(owner, name) for owner in owners for name in _HEADS if isinstance(owner.get(name), _LINEAR)]

    @cached_property
    def _tied(self) -> list[Any]:
        """The embeddings that may be the head."""
        return [module for module in self._model.modules() if hasattr(module, "as_linear")]

    @contextmanager
    def _reading(self, counts: Sequence[int]) -> Iterator[None]:
        """Have the head read the last position of each row only."""
        own = [(owner, name, owner[name]) for owner, name in self._own]
        for owner, name, head in own:
            owner[name] = _LastOnly(head, counts)
        for embedding in self._tied:
            embedding.as_linear = _reading_last(embedding.as_linear, counts)
        try:
            yield
        finally:
            for owner, name, head in own:
                owner[name] = head
            for embedding in self._tied:
                del embedding.as_linear


class _LastOnly(nn.Module):
    """A head that reads the last position of each row."""

    def __init__(self, module: nn.Module, counts: Sequence[int]) -> None:
        initialize: Any = super().__init__  # MLX leaves it untyped
        initialize()
        self.module = module
        self._counts = counts

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.module(_last(hidden, self._counts))
        return logits


def _reading_last(
    head: Callable[[mx.array], mx.array], counts: Sequence[int]
) -> Callable[[mx.array], mx.array]:
    return lambda hidden: head(_last(hidden, counts))


def _last(values: mx.array, counts: Sequence[int]) -> mx.array:
    """Return the values at each row's last position, [rows, 1, …], of [rows, positions, …]."""
    width = values.shape[1]
    if min(counts) == width:
        return values[:, -1:]
    places = mx.array(list(counts), mx.int32)[:, None, None] - 1
    return mx.take_along_axis(values, places, axis=1)
