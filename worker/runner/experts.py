"""Experts from disk: layers of experts that hold a part of them in memory and read the others when needed.

A mixture's token uses a few experts of each layer. Their weights, stacked by expert, are replaced by *slabs*
with one slot for each expert that may be in memory. A layer waits for the router's choice, reads the missing
experts from the weight files straight into slots, and runs upstream's own code with the numbers of the slots
in place of those of the experts. So the results are upstream's. If a pass chooses more experts than there are
slots, they run in several waves, each on the tokens that chose them.

Invariants: a slot is written only while no pass is using it: the router's choice is waited for together with
the last result of any layer (`ExpertMemory.pending`), and all earlier results are behind these on the stream.
An expert is found in a slot only after its last byte was read. A file that is shorter or newer than when it
was opened is an error, never a wrong weight.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from protocol.types import ExpertStatus

HALF_LIFE_PASSES = 64
"""Passes after which a use of an expert counts half."""
PREDICTED_TOKENS_MAX = 16
"""Tokens of a pass up to which the next layer's experts are predicted: a prompt uses nearly all of them."""
_F_RDADVISE = 44
"""Darwin's fcntl(2) command to read ahead."""

Ids = npt.NDArray[np.int64]


class ExpertFileError(RuntimeError):
    """A weight file cannot be read as when it was opened. The message names it."""


class ResidentExperts:
    """Which experts of a layer are in which slots: those used most, where older uses count less. Pure."""

    def __init__(self, experts: int, slots: int) -> None:
        self.slots = slots
        self.slot_of: Ids = np.full(experts, -1, np.int64)
        self._expert_in: list[int | None] = [None] * slots
        self._uses = [0.0] * experts
        self._used_at = [0] * experts
        self._passes = 0

    def choose(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Count a use of the experts `wanted`, at most as many as there are slots. Return the missing ones,
        each with a slot, which is empty until `fill` is called."""
        self._passes += 1
        for expert in wanted:
            self._uses[expert] = self._weight(expert) + 1
            self._used_at[expert] = self._passes
        missing = [expert for expert in wanted if self.slot_of[expert] < 0]
        needed = {*wanted}
        free = [slot for slot, expert in enumerate(self._expert_in) if expert is None]
        if len(missing) > len(free):
            kept = [(slot, expert) for slot, expert in enumerate(self._expert_in) if expert is not None]
            idle = sorted((self._weight(expert), slot) for slot, expert in kept if expert not in needed)
            for _, slot in idle[: len(missing) - len(free)]:
                free.append(slot)
                self.slot_of[self._expert_in[slot]] = -1
                self._expert_in[slot] = None
        return list(zip(missing, free, strict=False))

    def fill(self, expert: int, slot: int) -> None:
        """The expert is in the slot now."""
        self._expert_in[slot] = expert
        self.slot_of[expert] = slot

    def _weight(self, expert: int) -> float:
        """Return the number of uses, of which older ones count less."""
        return float(self._uses[expert] * 0.5 ** ((self._passes - self._used_at[expert]) / HALF_LIFE_PASSES))


class WeightFile:
    """A weight file that experts are read from. It is closed with its last user."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._state = self._current()

    def _current(self) -> tuple[int, int]:
        state = os.fstat(self._file)
        return state.st_size, state.st_mtime_ns

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill `buffer` from position `at`. Raises `ExpertFileError`."""
        if self._current() != self._state:
            raise ExpertFileError(f"{self.path} has changed since the model was loaded")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._file, [buffer[done:]], at + done)
            except OSError as error:
                raise ExpertFileError(f"{self.path} cannot be read: {error.strerror}") from None
            if count == 0:
                raise ExpertFileError(f"{self.path} is truncated: it ends before position {at + done}")
            done += count

    def read_ahead(self, at: int, size: int) -> None:
        """Ask the system to read a part soon, without waiting for it."""
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(self._file, _F_RDADVISE, struct.pack("qi", at, size))
            else:
                os.posix_fadvise(self._file, at, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # some file systems cannot


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One weight of a layer's experts: its slab, and where the experts' parts of it are in a file."""

    slab: memoryview
    file: WeightFile
    at: int
    expert_bytes: int

    def read(self, expert: int, slot: int) -> None:
        first = slot * self.expert_bytes
        self.file.read_into(
            self.slab[first : first + self.expert_bytes], self.at + expert * self.expert_bytes
        )

    def read_ahead(self, expert: int) -> None:
        self.file.read_ahead(self.at + expert * self.expert_bytes, self.expert_bytes)


@dataclass(slots=True)
class ExpertCounters:
    """Counts since the start. `wanted`: experts that passes needed, once for each layer; `read` of them were
    not in memory."""

    wanted: int = 0
    read: int = 0
    read_bytes: int = 0
    read_s: float = 0.0


class ExpertStore:
    """The experts of one layer: those in slots, and the files of all."""

    def __init__(
        self, resident: ResidentExperts, parts: Sequence[ExpertPart], counters: ExpertCounters
    ) -> None:
        self._resident = resident
        self._parts = parts
        self._counters = counters
        self.next: ExpertStore | None = None
        """The layer after this one."""
        self._followers: dict[int, Ids] = {}
        """The experts of the next layer that were chosen by the last token that chose an expert here."""
        self._chosen: Ids | None = None

    def slots_of(self, ids: Ids) -> Ids:
        """Return the slots of experts in memory."""
        slots: Ids = self._resident.slot_of[ids]
        return slots

    def waves(self, ids: Ids) -> Iterator[Ids]:
        """Yield the distinct experts in `ids` in parts that fit the slots, each when it is in memory; those
        in memory come first."""
        distinct = np.unique(ids)
        order = distinct[np.argsort(self._resident.slot_of[distinct] < 0, kind="stable")]
        for first in range(0, len(order), self._resident.slots):
            wave = order[first : first + self._resident.slots]
            self._load(wave.tolist())
            yield wave

    def _load(self, wanted: list[int]) -> None:
        """Read missing experts. Raises `ExpertFileError`."""
        missing, counters = self._resident.choose(wanted), self._counters
        counters.wanted += len(wanted)
        if not missing:
            return
        began = time.monotonic()
        for expert, slot in missing:
            for part in self._parts:
                part.read(expert, slot)
                counters.read_bytes += part.expert_bytes
            self._resident.fill(expert, slot)
            counters.read += 1
        counters.read_s += time.monotonic() - began

    def predict(self, chosen: Ids) -> None:
        """Have the next layer's likely experts read ahead: those that the last token with the same choice
        here went on to. `chosen`: [tokens, experts of a token]."""
        self._chosen = chosen if len(chosen) <= PREDICTED_TOKENS_MAX else None
        if self.next is None or self._chosen is None:
            return
        known = [
            self._followers[expert] for expert in np.unique(chosen).tolist() if expert in self._followers
        ]
        if known:
            likely = np.unique(np.concatenate(known))
            self.next.read_ahead(likely[self.next.slots_of(likely) < 0].tolist())

    def read_ahead(self, experts: Sequence[int]) -> None:
        """Ask the system to read experts soon."""
        for expert in experts[: self._resident.slots]:
            for part in self._parts:
                part.read_ahead(expert)

    def learn(self, before: ExpertStore | None, chosen: Ids) -> None:
        """Remember which experts follow those that the layer before has chosen for the same tokens."""
        if before is None or before._chosen is None or len(before._chosen) != len(chosen):
            return
        for own, following in zip(before._chosen, chosen, strict=True):
            for expert in own.tolist():
                before._followers[expert] = following


@dataclass(slots=True)
class ExpertMemory:
    """The experts of a network that are read from disk. `slots` of `experts` in each layer are in memory,
    `nbytes` in all."""

    slots: int
    experts: int
    nbytes: int
    stores: dict[str, ExpertStore] = field(default_factory=dict)
    """By the path of the layer's module."""
    counters: ExpertCounters = field(default_factory=ExpertCounters)
    pending: list[mx.array] = field(default_factory=list)
    """The last result of a layer, which may not be evaluated yet."""

    def status(self) -> ExpertStatus:
        """Return what is told in the heartbeat."""
        counters = self.counters
        return ExpertStatus(
            slots=self.slots,
            experts=self.experts,
            bytes=self.nbytes,
            wanted=counters.wanted,
            read=counters.read,
            read_bytes=counters.read_bytes,
            read_s=counters.read_s,
        )

    def attach(self, network: Any) -> None:
        """Have the layers of a network use the experts in memory. Their slabs are set by the caller."""
        modules = dict(network.named_modules())
        before: ExpertStore | None = None
        for path, store in self.stores.items():
            module = modules[path]
            module.__class__ = STREAMED[type(module)]
            module._memory, module._store, module._before = self, store, before
            if before is not None:
                before.next = store
            before = store


class _Streamed:
    """Mixin of a layer of experts that are read from disk. Takes [..., width] and the numbers of each token's
    experts, [..., experts of a token]."""

    _memory: ExpertMemory
    _store: ExpertStore
    _before: ExpertStore | None

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        mx.eval(x, indices, self._memory.pending)
        ids: Ids = np.array(indices).astype(np.int64)
        chosen = ids.reshape(-1, ids.shape[-1])
        self._store.learn(self._before, chosen)
        waves = self._store.waves(ids)
        first = next(waves)
        self._store.predict(chosen)
        if np.isin(ids, first).all():
            return self._run(x, self._store.slots_of(ids))
        return self._run_waves(x, ids, first, waves)

    def _run_waves(self, x: mx.array, ids: Ids, first: Ids, others: Iterator[Ids]) -> mx.array:
        """Run the pairs of tokens and experts wave by wave, each as a token with one expert."""
        tokens = x.reshape(-1, x.shape[-1])
        flat, outputs, order = ids.reshape(-1), [], []
        wave: Ids | None = first
        while wave is not None:
            pairs = np.flatnonzero(np.isin(flat, wave))
            slots = self._store.slots_of(flat[pairs])[:, None]
            output = self._run(tokens[mx.array(pairs // ids.shape[-1])], slots)
            mx.eval(output)  # the next wave is read into the same slots
            outputs.append(output[:, 0])
            order.append(pairs)
            wave = next(others, None)
        places = mx.array(np.argsort(np.concatenate(order)))
        return mx.concatenate(outputs)[places].reshape(*ids.shape, -1)

    def _run(self, x: mx.array, slots: Ids) -> mx.array:
        result: mx.array = super().__call__(x, mx.array(slots.astype(np.uint32)))  # type: ignore[misc]
        self._memory.pending = [result]
        return result


class StreamedGLU(_Streamed, SwitchGLU):
    """Upstream's gated experts, from disk."""


class StreamedMLP(_Streamed, SwitchMLP):
    """Upstream's experts without a gate, from disk."""


STREAMED: dict[type[nn.Module], type[nn.Module]] = {SwitchGLU: StreamedGLU, SwitchMLP: StreamedMLP}
"""The modules whose experts can be read from disk."""
