"""The rows of one model: prefilled in chunks, then decoded together, on caches of ours over upstream's.

A row is in one of three places: *prefilling*, with caches of its own; *joining*, started since the last
step; or in a *group* of rows that decode in one forward pass. Mostly there is one group; rows of very unequal
length are kept in several, and rows of a model that cannot be batched in one each. What must hold: a group's
caches, pending tokens and sampler have one entry per row, in one order. A row that is dropped leaves a hole
until the next step, which closes all holes and takes in all joining rows at once.

Decoding is double-buffered: `step` dispatches the forward pass that feeds the pending tokens before it reads
them, so the device works while the tokens are handled. One pass is wasted when a row ends. What rows with a
grammar draw is dispatched behind that, when their guides have seen the pending tokens: the guides work while
the device runs the passes of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from worker.contract import NO_TARGETS, Cut, Draw, Likelihood, Piece, Step, Targets
from worker.drafts import NO_DRAFTS, Drafter, Weigher
from worker.engine.ahead import Ahead, AheadGroup
from worker.engine.caches import grouping, packing, stored
from worker.engine.caches.batch import Batch, RowCaches
from worker.engine.caches.cost import row_cost
from worker.engine.caches.gaps import gapped
from worker.engine.caches.prefill import prefill_abreast, prefill_together
from worker.engine.caches.spans import NO_GAPS, Gaps
from worker.engine.caches.trial import Abilities, Stage, find_abilities
from worker.engine.following import Followers
from worker.engine.group import Group, Member
from worker.engine.hearing import Deaf, Ear
from worker.engine.sampling.helpers import Helpers, Job
from worker.engine.sampling.row import Row
from worker.engine.sampling.sampler import Agree, Sampled
from worker.engine.scoring import piece_tokens, prefill_scored
from worker.engine.sight import Sight
from worker.engine.trees import arrays_of, held_bytes
from worker.guides import Foreseen
from worker.pictures import Blob, Picture

TOKENS_PER_CLEAR = 256
"""How deep the rows advance before buffers that are kept for reuse are given back to the system."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """What a forward pass draws, with the rows it was for, in their order."""

    members: list[Member]
    sampled: Sampled


class BatchEngine:
    """`contract.Engine` on MLX."""

    def __init__(
        self,
        model: nn.Module,
        abilities: Abilities | None = None,
        drafter: Drafter | None = None,
        ear: Ear | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`model`: called as `model(tokens, cache=…)`; a `VisionNetwork`, if rows are to have images.
        `abilities`: what its rows can do; None: that is tried, on the model as it is. `drafter`: shares the
        memory for caches. `ear`: the drafter's, if it guesses by what the model thinks. `agree`: see
        `Sampler`."""
        self._model = model
        self._fresh = partial(make_prompt_cache, model)
        """Makes empty caches of a row. No method: who has it must not keep the engine alive."""
        self._sight = Sight(model)
        self.abilities = abilities or find_abilities(Stage(model))
        self.is_batchable, self._can_pad = self.abilities.together, self.abilities.padded
        self.shape = stored.shape_of(self._fresh()) if self.abilities.restorable else None
        self.drafter = drafter
        self.can_leave_out = self.abilities.sparse
        self.weigher: Weigher | None = (
            drafter if isinstance(drafter, Followers) and drafter.can_weigh else None
        )
        self._cost = row_cost(model)
        self._prefilling: dict[str, RowCaches] = {}
        self._stands: dict[str, int] = {}
        """How many of their tokens are run, of these."""
        self._gaps: dict[str, Gaps] = {}
        """What was left out of rows that are prefilled."""
        self._members: dict[str, Member] = {}
        self._joining: list[Member] = []
        self._groups: list[Group] = []
        self._ear = ear or Deaf()
        self._ahead = Ahead(model, self._fresh, self._ear, agree)
        self._new_group = partial(Group, agree)
        self._unread: list[_Unread] = []
        self._helpers = Helpers()
        self._advanced = 0
        self._piece_tokens = 0
        """Of a prompt whose tokens' likelihoods are asked; 0: not known yet."""

    # --- images ---

    def look(self, picture: Picture) -> int:
        """See `contract.Engine`."""
        return self._sight.look(picture)

    def forget(self, digest: str) -> None:
        """See `contract.Engine`."""
        self._sight.forget(digest)

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        """See `contract.Engine`."""
        self._sight.show(row, tokens, pictures)

    # --- prefill ---

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, Targets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Likelihood]]:
        """See `contract.Engine`. Returns when the chunks are computed. A row with targets runs by itself."""
        silent = {row: tokens for row, tokens in chunks.items() if row not in targets}
        plain = {row: tokens for row, tokens in silent.items() if not self._sight.has(row)}
        for row in silent.keys() - plain.keys():
            self._sight.prefill(row, len(silent[row]), self._prefilling.setdefault(row, self._fresh()))
            self._ear.skip(row, len(silent[row]))
        if self._can_pad and len(plain) > 1 and not self._prefilling.keys() & plain.keys():
            self._prefilling |= prefill_together(self._model, plain)
            self._ear.hear(list(plain), [len(tokens) for tokens in plain.values()])
        elif self._are_abreast(plain):
            self._prefilling |= prefill_abreast(self._model, plain, self._prefilling)
            self._ear.hear(list(plain), [len(tokens) for tokens in plain.values()])
        else:
            for row, tokens in plain.items():
                caches = self._prefilling.setdefault(row, self._fresh())
                given = gapped(caches, self._gaps.get(row, NO_GAPS))
                self._model(mx.array([list(tokens)], mx.uint32), cache=given)
                self._ear.hear([row], [len(tokens)])
        mx.eval([cache.state for row in silent for cache in self._prefilling[row]])
        likelihoods = {row: self._prefill_scored(row, chunks[row], asked) for row, asked in targets.items()}
        for row, tokens in chunks.items():
            self._stands[row] = self._stands.get(row, 0) + len(tokens)
        self._advance(max(map(len, chunks.values())))
        return likelihoods

    def _are_abreast(self, chunks: Mapping[str, Sequence[int]]) -> bool:
        """Whether these are pieces of one length, of rows that have been run to one position."""
        if not self.abilities.abreast or len(chunks) < 2 or self._gaps.keys() & chunks.keys():
            return False
        begun = all(row in self._prefilling for row in chunks)
        return begun and len({(self._stands.get(row), len(tokens)) for row, tokens in chunks.items()}) == 1

    def _prefill_scored(self, row: str, tokens: Sequence[int], asked: Targets) -> list[Likelihood]:
        self._piece_tokens = self._piece_tokens or piece_tokens(self._model)
        caches = self._prefilling.setdefault(row, self._fresh())
        self._ear.skip(row, len(tokens))
        return prefill_scored(self._model, tokens, caches, asked, self._piece_tokens)

    def leave_out(self, row: str, first: int, last: int) -> None:
        """See `contract.Engine`."""
        self._gaps[row] = self._gaps.get(row, NO_GAPS).and_also(first, last)
        self._ear.skip(row, last - first)

    def fork(self, row: str, copy: str) -> None:
        """See `contract.Engine`."""
        self._gaps |= {copy: self._gaps[row]} if row in self._gaps else {}
        if row in self._prefilling:
            self._prefilling[copy] = deepcopy(self._prefilling[row])
            self._stands[copy] = self._stands[row]
        self._sight.copy(row, copy)
        self._ear.copy(row, copy)

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        """See `contract.Engine`."""
        caches = self._prefilling.pop(row, None) or self._fresh()
        drawing = Row(draw, self._sight.ids(row, tokens), prompt_tokens)
        token = mx.array([tokens[-1]], mx.uint32)
        gaps = self._gaps.pop(row, NO_GAPS)
        self._stands.pop(row, None)
        member = Member(row, len(tokens), drawing, token, caches, self._sight.shift(row), gaps)
        self._members[row] = member
        self._joining.append(member)

    # --- what is stored of rows ---

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """See `contract.Engine`."""
        source, place = self._source(row)
        columns = [stored.columns_of(source, place, first, last) for first, last in runs]
        state = stored.states_of(source, place) if states else None
        mx.eval([arrays_of(held.layers) for held, _ in columns], arrays_of(state and state.layers))
        cuts = [Cut(held, held.nbytes, whole_from) for held, whole_from in columns]
        return cuts, None if state is None else Cut(state, state.nbytes)

    def _source(self, row: str) -> tuple[RowCaches | Batch, int]:
        """Where a row's caches are, and its place in them."""
        if row in self._prefilling:
            return self._prefilling[row], 0
        member = self._members[row]
        groups: list[Group | AheadGroup] = [*self._groups, *self._ahead.groups]
        group = next((group for group in groups if member in group.members), None)
        return (member.caches, 0) if group is None else group.source(member)

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """See `contract.Engine`."""
        caches = self._fresh()
        stored.rebuild(caches, pieces, states)
        mx.eval([cache.state for cache in caches])
        self._prefilling[row] = caches
        self._stands[row] = count = sum(piece.count for piece in pieces)
        self._sight.skip(row, count)
        self._ear.skip(row, count)

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        """See `contract.Engine`."""
        assert isinstance(payload, stored.Columns | stored.States), "of a cut"
        return packing.pack(payload)

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        """See `contract.Engine`."""
        payload = packing.unpack(blobs, rest)
        return Cut(payload, payload.nbytes)

    # --- decode ---

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        """See `contract.Engine`. Waits for what the last step set out to compute."""
        unread, self._unread = self._unread, []
        self._reseat()
        drafts = drafts if self.abilities.ahead else NO_DRAFTS
        turning = [
            group for group in self._groups if any(m.name in drafts and not m.is_sparse for m in group.living)
        ]
        self._groups = [group for group in self._groups if group not in turning]
        questions = [question for group in self._groups for question in self._dispatched(group)]
        step = self._read(unread)
        self._helpers.run(questions)
        self._unread = [_Unread(list(group.members), group.drawn()) for group in self._groups]
        for group in turning:
            members = group.detach(self._fresh)
            self._ahead.board([member for member in members if not member.is_sparse])
            self._joining += [member for member in members if member.is_sparse]
        self._advance(1)
        return self._ahead.run(step, drafts, self._helpers)

    def _dispatched(self, group: Group) -> Sequence[Job]:
        questions = group.dispatch(self._model)
        fed = [member.length - 2 for member in group.members]  # the last one is being drawn
        self._ear.hear([member.name for member in group.members], [1] * len(fed), fed)
        return questions

    def foresee(self, row: str, most: int) -> Foreseen:
        """See `contract.Engine`."""
        if not self.abilities.ahead or most <= 0 or row not in self._members:
            return Foreseen()
        return self._members[row].row.foresee(most)

    def _read(self, unread: list[_Unread]) -> Step:
        tokens: dict[str, int] = {}
        likelihoods: dict[str, Likelihood] = {}
        failed: dict[str, Exception] = {}
        for pass_ in unread:
            drawn: Any = pass_.sampled.tokens.tolist()
            told = pass_.sampled.likelihoods()
            for place, (member, token) in enumerate(zip(pass_.members, drawn, strict=True)):
                if member.dropped:
                    continue
                if (failure := member.row.failure) is not None:
                    failed[member.name] = failure
                    continue
                member.row.saw(token)
                tokens[member.name] = token
                if place in told:
                    likelihoods[member.name] = told[place]
        return Step(tokens, likelihoods, failed)

    def drop(self, row: str) -> None:
        """See `contract.Engine`."""
        self._prefilling.pop(row, None)
        self._stands.pop(row, None)
        self._gaps.pop(row, None)
        self._sight.drop(row)
        if self.drafter is not None:
            self.drafter.drop(row)
        member = self._members.pop(row, None)
        if member is None:
            return
        member.dropped = True
        self._joining = [joining for joining in self._joining if joining is not member]
        # What nobody waits for is let go at once, not at a step that may never come.
        self._groups = [group for group in self._groups if not group.is_abandoned]
        self._ahead.let_go()
        self._unread = [pass_ for pass_ in self._unread if not all(m.dropped for m in pass_.members)]

    def reset(self) -> None:
        """See `contract.Engine`."""
        for held in (
            self._prefilling,
            self._stands,
            self._gaps,
            self._members,
            self._joining,
            self._groups,
            self._ahead.groups,
            self._unread,
        ):
            held.clear()
        self._sight.clear()
        if self.drafter is not None:
            self.drafter.reset()
        mx.clear_cache()

    # --- bytes ---

    def cache_bytes(self) -> int:
        """See `contract.Engine`. Counts buffers as they are allocated; evaluates nothing."""
        rows = [*self._prefilling.values(), *(member.caches for member in self._joining)]
        own = sum(held_bytes(cache) for caches in rows for cache in caches)
        groups: list[Group | AheadGroup] = [*self._groups, *self._ahead.groups]
        drafting = self.drafter.cache_bytes() if self.drafter is not None else 0
        return own + drafting + sum(group.nbytes for group in groups)

    def row_bytes(self, tokens: int) -> int:
        """See `contract.Engine`."""
        return self._cost(tokens) + (self.drafter.row_bytes(tokens) if self.drafter is not None else 0)

    # --- who decodes with whom ---

    def _reseat(self) -> None:
        dense = [member for member in self._joining if not member.is_sparse]
        sparse = [member for member in self._joining if member.is_sparse]
        self._joining = [*self._ahead.reseat(dense), *sparse]
        if not self._joining and not any(group.has_holes for group in self._groups):
            return
        joining, self._joining = self._joining, []
        coming = self._placed(joining) if self.is_batchable else self._apart(joining)
        for group, members in zip(self._groups, coming, strict=True):
            group.reseat(members, self._fresh)
        self._groups = [group for group in self._groups if group.members]

    def _apart(self, joining: list[Member]) -> list[list[Member]]:
        """Who joins which group, where every row has one of its own."""
        coming: list[list[Member]] = [[] for _ in self._groups]
        coming += [[member] for member in joining]
        self._groups += [self._new_group() for _ in joining]
        return coming

    def _placed(self, joining: list[Member]) -> list[list[Member]]:
        """Who joins which group; groups are added and formed anew as memory asks for it."""
        lengths = [[member.columns for member in group.living] for group in self._groups]
        coming: list[list[Member]] = [[] for _ in self._groups]
        for member in sorted(joining, key=lambda member: -member.columns):
            place = grouping.place(lengths, member.columns)
            if place == len(lengths):
                self._groups.append(self._new_group())
                lengths.append([])
                coming.append([])
            lengths[place].append(member.columns)
            coming[place].append(member)
        if grouping.is_fine(lengths):
            return coming
        everybody = [*joining, *(member for group in self._groups for member in group.detach(self._fresh))]
        parts = grouping.partition([member.columns for member in everybody])
        self._groups = [self._new_group() for _ in parts]
        return [[everybody[row] for row in part] for part in parts]

    def _advance(self, tokens: int) -> None:
        # Clearing costs every later step its warm buffers, never clearing keeps those of outgrown caches.
        self._advanced += tokens
        if self._advanced >= TOKENS_PER_CLEAR:
            self._advanced = 0
            mx.clear_cache()
