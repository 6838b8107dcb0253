"""The engine of one model: prefills rows in chunks and decodes them together (continuous batching).

A row is in one of three places: *prefilling*, with caches of its own; *joining*, started since the last step;
or in a *decode batch*, whose rows share a forward pass. There is one batch, unless the model's rows cannot
share one, or not with rows of any length. Invariant: a batch's caches, pending tokens and sampler have one
entry per row, in one order. A dropped row leaves a hole until the next step, which removes all holes and adds
all joining rows at once.

Decoding is double-buffered: `step` dispatches the forward pass that feeds the pending tokens before it reads
them, so the device works while the host handles the tokens. One pass is wasted when a row ends. Tokens of
rows with a grammar are sampled behind that pass, once their guides have seen the pending tokens. The guides
work while the device runs the passes of all batches. Drafts are verified in a pass of their own, once the
pending tokens have been read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.interfaces import DraftProposer, ImportanceScorer
from worker.runner.decode_batch import DecodeBatch, DecodeModel, first_sample
from worker.runner.drafters.draft_model import DraftModelProposer
from worker.runner.drafters.mtp import HiddenStateProposer
from worker.runner.kv import snapshots
from worker.runner.kv.batch import CacheBatch, RowCaches
from worker.runner.kv.capability_probe import BatchCapabilities, ProbeTarget, probe_capabilities
from worker.runner.kv.positions import route_attention
from worker.runner.kv.row_caches import fresh_caches, row_cost
from worker.runner.lora import Adapters
from worker.runner.prefill import PrefillRunner
from worker.runner.rows import EngineRow
from worker.runner.sampling.grammar_masks import MaskThreads
from worker.runner.sampling.sampler import Agree, Sampled
from worker.runner.sampling.state import SamplingState
from worker.runner.trees import held_bytes
from worker.runner.verification import AcceptedTokens
from worker.runner.vision import RowImages
from worker.values import (
    NO_DRAFTS,
    NO_EMBEDDINGS,
    NO_LAST,
    NO_TARGETS,
    ArrayBytes,
    CacheSegment,
    CacheSlice,
    EncodedImage,
    ForcedTokens,
    ImageInput,
    KVQuantization,
    Logprob,
    LogprobTargets,
    SamplingParams,
    StepOutput,
)

TOKENS_PER_CLEAR = 256
"""Decode steps or prefilled tokens between calls of `mx.clear_cache`."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """The unread samples of a forward pass, and its rows in order."""

    members: list[EngineRow]
    sampled: Sampled


class BatchEngine:
    """`Engine` on MLX."""

    def __init__(
        self,
        model: nn.Module,
        capabilities: BatchCapabilities | None = None,
        drafter: DraftProposer | None = None,
        agree: Agree | None = None,
        kv_quantization: KVQuantization | None = None,
    ) -> None:
        """`model`: called as `model(tokens, cache=…)`; a `VisionNetwork`, if rows may have images.
        `capabilities`: what its rows support; None: probe `model`. `drafter`: shares the memory for caches.
        `agree`: see `Sampler`.
        `kv_quantization`: how rows are quantized; None: never."""
        self._model = model
        self.adapters = Adapters(model)
        self._fresh = partial(fresh_caches, model, kv_quantization)
        """Makes empty caches of a row. No method: a holder of it must not keep the engine alive."""
        self._images = RowImages(model)
        route_attention(model)
        self.capabilities = capabilities or probe_capabilities(ProbeTarget(model))
        if kv_quantization is not None:
            # Upstream cannot merge quantized caches.
            self.capabilities = replace(self.capabilities, padded=False, abreast=False)
        self.shape = snapshots.shape_of(self._fresh()) if self.capabilities.restorable else None
        self.drafter = drafter
        self.can_skip_tokens = self.capabilities.sparse and kv_quantization is None
        self.importance_scorer: ImportanceScorer | None = (
            drafter if isinstance(drafter, DraftModelProposer) and drafter.can_score_tokens else None
        )
        self._cost = row_cost(model, self._fresh())
        self._rows: dict[str, EngineRow] = {}
        self._joining: list[EngineRow] = []
        self._batches: list[DecodeBatch] = []
        mtp = drafter if isinstance(drafter, HiddenStateProposer) else None
        self._prefill = PrefillRunner(model, self._rows, self._fresh, self.adapters.batch, mtp, self._images)
        self._agree = agree
        self._decode_model = DecodeModel(
            model,
            self._fresh,
            self.adapters.batch.applied,
            mtp,
            agree,
            is_batchable=self.capabilities.together,
            is_bucketed=self.capabilities.bucketed,
        )
        self._unread: list[_Unread] = []
        self._helpers = MaskThreads()
        self._advanced = 0
        self._rows_max: int | None = None

    def limit_passes(self, rows_max: int, draft_tokens_max: int) -> None:
        """Limit the rows of a decode pass, and the tokens of a verify pass, which then has one row (0: no
        drafts); prefill each prompt alone. Call it while there are no rows."""
        self._rows_max = rows_max
        able = self.capabilities
        self.capabilities = replace(
            able,
            together=able.together and rows_max > 1,
            padded=False,
            abreast=False,
            ahead=able.ahead and draft_tokens_max > 0,
        )
        if not self.capabilities.ahead:
            self.drafter = self._prefill.mtp = None
        self._decode_model = replace(
            self._decode_model,
            mtp=self._prefill.mtp,
            rows_max=rows_max,
            width_max=draft_tokens_max or 1,
        )

    # --- images ---

    def encode_image(self, image: ImageInput) -> EncodedImage:
        return self._images.encode(image)

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        self._images.set_images(row, tokens, images)

    # --- adapters ---

    def set_adapter(self, row: str, adapter: str) -> None:
        assert adapter in self.adapters.names, "the adapter of a row is loaded"
        self._prefill.row(row).adapter = adapter

    # --- prefill ---

    def expect_tokens(self, row: str, tokens: int) -> None:
        self._prefill.row(row).expected = tokens

    def prefill(
        self,
        chunks: Mapping[str, Sequence[int]],
        targets: Mapping[str, LogprobTargets] = NO_TARGETS,
        last: Mapping[str, int] = NO_LAST,
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
    ) -> Mapping[str, Sequence[Logprob]]:
        """Return when the chunks are computed."""
        # With `--exact`, or where cuts change answers, the last token is run alone, as upstream runs it.
        last = last if self._rows_max is None and self.capabilities.cut else NO_LAST
        likelihoods = self._prefill.run(chunks, targets, last, embeddings, self.capabilities)
        self._advance(max(map(len, chunks.values())))
        return likelihoods

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        self._prefill.skip_tokens(row, first, last)

    def fork(self, row: str, copy: str) -> None:
        self._prefill.fork(row, copy)

    def start(
        self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams
    ) -> StepOutput:
        member = self._prefill.row(row)
        member.sampling = SamplingState(sampling, self._images.ids(row, tokens), prompt_tokens)
        member.length, member.token = len(tokens), mx.array([tokens[-1]], mx.uint32)
        member.shift = self._images.shift(row)
        self._joining.append(member)
        logits, member.logits = member.logits, None
        if logits is None:
            return StepOutput({}, {})
        return self._read([_Unread([member], first_sample(member, logits, self._agree))])

    # --- stored caches ---

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        source, place = self._source(row)
        return snapshots.cuts_of(source, place, runs, states=states)

    def _source(self, row: str) -> tuple[RowCaches | CacheBatch, int]:
        """Return the caches that a row is in, and its place in them."""
        member = self._rows[row]
        batch = next((batch for batch in self._batches if member in batch.members), None)
        return (member.caches, 0) if batch is None else batch.source(member)

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        prompt, count = self._prefill.row(row), sum(piece.count for piece in pieces)
        caches = self._fresh()
        snapshots.rebuild(caches, pieces, states, prompt.expected)
        mx.eval([cache.state for cache in caches])
        prompt.caches, prompt.tokens = caches, count
        self._images.skip(row, count)
        if self._prefill.mtp is not None:
            self._prefill.mtp.skip(row, count)

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        assert isinstance(payload, snapshots.KVSlice | snapshots.StateSnapshot), "cut returned it"
        return snapshots.pack(payload)

    def allocate(self, nbytes: int) -> memoryview:
        return snapshots.allocate(nbytes)

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        payload = snapshots.unpack(blobs, rest)
        return CacheSlice(payload, payload.nbytes)

    # --- decode ---

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        """Wait for the samples that the previous step dispatched."""
        unread, self._unread = self._unread, []
        self._rearrange()
        drafts = drafts if self.capabilities.ahead else NO_DRAFTS
        plain = [batch for batch in self._batches if not batch.may_verify(drafts)]
        questions = [question for batch in plain for question in batch.dispatch()]
        step = self._read(unread)
        behind = {row: _behind(step.tokens.get(row), drafted) for row, drafted in drafts.items()}
        others = [batch for batch in self._batches if batch not in plain]
        verifying = [batch for batch in others if batch.may_verify(behind)]
        for batch in others:
            if batch not in verifying:
                questions += batch.dispatch()
                plain.append(batch)
        if questions:
            self._helpers.run(questions)
        self._unread = [_Unread(list(batch.members), batch.drawn()) for batch in plain]
        self._advance(1)
        for batch in verifying:
            step = _with_accepted(step, batch.verify(behind, self._helpers))
        return step

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        member = self._rows.get(row)
        if not self.capabilities.ahead or most <= 0 or member is None or not member.length:
            return ForcedTokens()
        return member.sampling.forced_tokens(most)

    def _read(self, unread: list[_Unread]) -> StepOutput:
        tokens: dict[str, int] = {}
        likelihoods: dict[str, Logprob] = {}
        failed: dict[str, Exception] = {}
        for pass_ in unread:
            drawn: Any = pass_.sampled.tokens.tolist()
            told = pass_.sampled.likelihoods()
            for place, (member, token) in enumerate(zip(pass_.members, drawn, strict=True)):
                if member.dropped:
                    continue
                if (failure := member.sampling.failure) is not None:
                    failed[member.name] = failure
                    continue
                member.sampling.accept_token(token)
                tokens[member.name] = token
                if place in told:
                    likelihoods[member.name] = told[place]
        return StepOutput(tokens, likelihoods, failed)

    def drop(self, row: str) -> None:
        self._images.drop(row)
        if self.drafter is not None:
            self.drafter.drop(row)
        member = self._rows.pop(row, None)
        if member is None or not member.length:
            return
        member.dropped = True
        self._joining = [joining for joining in self._joining if joining is not member]
        # Release unused batches and passes now: the next step may never come.
        self._batches = [batch for batch in self._batches if not batch.is_abandoned]
        self._unread = [pass_ for pass_ in self._unread if not all(m.dropped for m in pass_.members)]

    def reset(self) -> None:
        for held in (self._rows, self._joining, self._batches, self._unread):
            held.clear()
        self._images.clear()
        if self.drafter is not None:
            self.drafter.reset()
        mx.clear_cache()

    # --- bytes ---

    def cache_bytes(self) -> int:
        """Return the allocated bytes; evaluates nothing."""
        own = sum(held_bytes(cache) for row in self._rows.values() for cache in row.caches)
        drafting = self.drafter.cache_bytes() if self.drafter is not None else 0
        return own + drafting + sum(batch.nbytes for batch in self._batches)

    def row_bytes(self, tokens: int) -> int:
        return self._cost(tokens) + (self.drafter.row_bytes(tokens) if self.drafter is not None else 0)

    # --- batches ---

    def _rearrange(self) -> None:
        """Remove dropped rows, and add the joining ones to batches with room for them."""
        joining, self._joining = self._joining, []
        coming: dict[DecodeBatch, list[EngineRow]] = {batch: [] for batch in self._batches}
        for member in joining:
            batch = next((batch for batch, rows in coming.items() if batch.has_room(rows, member)), None)
            coming.setdefault(batch or DecodeBatch(self._decode_model), []).append(member)
        for batch, rows in coming.items():
            batch.rearrange(rows)
        self._batches = [batch for batch in coming if batch.members]

    def _advance(self, tokens: int) -> None:
        # Clearing too often costs later steps their warm buffers; never clearing keeps those of outgrown
        # caches.
        self._advanced += tokens
        if self._advanced >= TOKENS_PER_CLEAR:
            self._advanced = 0
            mx.clear_cache()


def _behind(token: int | None, drafted: Sequence[int]) -> Sequence[int]:
    """Return the rest of a draft once `token`, the sample at its first position, has been read; empty if
    rejected."""
    if token is None:
        return drafted
    return drafted[1:] if drafted and drafted[0] == token else ()


def _with_accepted(step: StepOutput, accepted: Mapping[str, AcceptedTokens]) -> StepOutput:
    """Return a step merged with the tokens accepted behind those that it has read."""
    tokens, likelihoods = dict(step.tokens), dict(step.likelihoods)
    failed, further = dict(step.failed), dict(step.further)
    for row, each in accepted.items():
        drawn = list(each.drawn)
        if each.failure is not None:
            failed[row] = each.failure
        if row not in tokens and drawn:
            tokens[row], likelihood = drawn.pop(0)
            likelihoods |= {} if likelihood is None else {row: likelihood}
        further[row] = drawn
    return StepOutput(tokens, likelihoods, failed, further)
