"""Which models are in memory. Pure: what is wanted of each, what it takes and the time go in, who is to run
comes out.

A model is loaded when a request waits for it, and stays until its room is needed, or until nobody has used it
for long. Room is made by ending those that nobody uses, the longest unused first. Where all others are in use
they take turns: the one that has had its turn for longest is *held*, it gets no new requests, and ends when
those it has are done. What must always hold:

* what is wanted and what has not ended yet fits into the budget, as far as sizes are known beforehand;
* a model with requests aboard is never ended, nor one that is resident;
* who has waited longest is next, and once it has waited for long nobody small slips in before it: so
  everybody who fits at all is served in the end, if requests end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.orders import ModelState, Roster

TURN_S = 20.0
"""So long a model may stay in use while another one waits, and so long that one waits before it may ask."""
PAUSE_S = 1.0
"""So short a pause between two requests is no end of a model's use, while it has its turn."""


@dataclass(frozen=True, slots=True)
class Use:
    """What is wanted of a model now. `loaded`: a worker could serve it. `waiting_since`: of its requests that
    are aboard no worker, the eldest; None: there are none. `cache_bytes`: what its caches take."""

    loaded: bool = False
    aboard: int = 0
    waiting_since: float | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`wanted`: are to run. `held`: get no new requests, so that they can end."""

    wanted: frozenset[str]
    held: frozenset[str]


@dataclass(slots=True)
class _Model:
    """`weight`: what its process took when it had just been loaded."""

    state: ModelState
    wanted: bool
    used_at: float
    loaded_at: float | None = None
    weight: int | None = None
    use: Use = Use()

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def present(self) -> bool:
        return self.state.stage in ("running", "ending")

    @property
    def estimate(self) -> int | None:
        """Bytes that it will take, once loaded; None: nobody can say."""
        known = [size for size in (self.weight, self.state.weight_bytes) if size is not None]
        return max(known, default=None)

    @property
    def held_bytes(self) -> int:
        """What it takes now that it is loaded. A GPU of its own is no part of a process's memory, so caches
        are counted apart, too."""
        return max(self.state.memory_bytes, (self.estimate or 0) + self.use.cache_bytes)

    def waited_s(self, now: float) -> float:
        return 0.0 if self.use.waiting_since is None else now - self.use.waiting_since

    def is_used(self, now: float) -> bool:
        """Somebody waits for it, or may be about to ask again."""
        has_turn = self.loaded_at is not None and now - self.loaded_at < TURN_S
        return self.use.waiting_since is not None or (has_turn and now - self.used_at < PAUSE_S)

    @property
    def may_end(self) -> bool:
        return self.wanted and not self.state.resident and not self.use.aboard


class Residency:
    """The models of one supervisor. `unload_after_s`: without use; None: only when room is needed."""

    def __init__(self, *, unload_after_s: float | None) -> None:
        self._unload_after_s = unload_after_s
        self._budget: int | None = None
        self._models: dict[str, _Model] = {}

    def told(self, roster: Roster, now: float) -> None:
        """How the models stand. The first time, those that run are wanted: somebody before us wanted them."""
        self._budget = roster.memory_budget
        for state in roster.models:
            if (model := self._models.get(state.name)) is None:
                wanted = state.resident or state.stage == "running"
                self._models[state.name] = _Model(state, wanted, used_at=now)
                continue
            model.state = state
            if model.use.loaded and model.weight is None:
                model.weight = state.memory_bytes or None

    def refusal(self, name: str) -> str | None:
        """Why the model cannot be had, now or at all; None: its requests may wait for it."""
        model = self._models[name]
        if model.state.stage == "failed":
            return f"The model `{name}` cannot be loaded; the server's log says why."
        if self._budget is None or model.state.resident:
            return None
        least = sum(other.estimate or 0 for other in self._models.values() if other.state.resident)
        needed, room = model.state.weight_bytes or 0, self._budget - least
        if needed > room:
            return f"The model `{name}` takes {_gb(needed)}, and the memory budget leaves {_gb(room)} for it."
        return None

    def _residents(self) -> int:
        """What those take that are always there."""
        return sum(
            model.held_bytes if model.use.loaded else model.estimate or 0
            for model in self._models.values()
            if model.state.resident
        )

    def decide(self, uses: Mapping[str, Use], now: float) -> Decision:
        """Who is to run from now on."""
        for model in self._models.values():
            self._observe(model, uses.get(model.name, Use()), now)
        self._end_unused(now)
        self._keep_within_budget(now)
        held = self._let_in(now)
        wanted = frozenset(model.name for model in self._models.values() if model.wanted)
        return Decision(wanted, held)

    def _observe(self, model: _Model, use: Use, now: float) -> None:
        if model.state.stage == "failed":
            model.wanted = model.state.resident
        if use.aboard or use.waiting_since is not None:
            model.used_at = now
        if not use.loaded:
            model.loaded_at = None
        elif model.loaded_at is None:
            model.loaded_at = model.used_at = now
        if use.loaded and not model.use.loaded:
            model.weight = None  # to be measured anew: it may have become another one
        model.use = use

    def _end_unused(self, now: float) -> None:
        if self._unload_after_s is None:
            return
        for model in self._models.values():
            unused = model.use.waiting_since is None and now - model.used_at >= self._unload_after_s
            if model.may_end and model.loaded_at is not None and unused:
                model.wanted = False

    def _keep_within_budget(self, now: float) -> None:
        """Caches grow: what runs may come to take more than it did at first."""
        if self._budget is None:
            return
        for model in self._idle(now):
            if self._taken() - self._going() <= self._budget:
                return
            model.wanted = False

    # --- room ---

    def _let_in(self, now: float) -> frozenset[str]:
        """Those that are waited for come in, in their order; the models that are held to make room."""
        for model in self._awaited():
            if self._budget is None or self._taken() + self._size(model) <= self._budget:
                model.wanted, model.used_at = True, now
                continue
            if self.refusal(model.name) is not None:
                continue
            held = self._make_room(model, now)
            if held is not None or model.waited_s(now) >= TURN_S:
                return held or frozenset()
        return frozenset()

    def _awaited(self) -> list[_Model]:
        waiting = [
            model
            for model in self._models.values()
            if model.use.waiting_since is not None and not model.wanted and model.state.stage != "failed"
        ]
        return sorted(waiting, key=lambda model: model.use.waiting_since or 0.0)

    def _make_room(self, newcomer: _Model, now: float) -> frozenset[str] | None:
        """Those that are held for it. None: there is no room to be made now."""
        assert self._budget is not None
        lacking = self._taken() - self._going() + self._size(newcomer) - self._budget
        if lacking <= 0:
            return frozenset()  # enough of them end already
        idle, busy = self._idle(now), self._had_their_turn(newcomer, now)
        if sum(map(self._size, [*idle, *busy])) < lacking:
            return None
        held = []
        for model in [*idle, *busy]:
            if lacking <= 0:
                break
            lacking -= self._size(model)
            if model.use.aboard:
                held.append(model.name)
            else:
                model.wanted = False
        return frozenset(held)

    def _idle(self, now: float) -> list[_Model]:
        """Those that nobody uses, the longest unused first."""
        idle = [model for model in self._models.values() if model.may_end and not model.is_used(now)]
        return sorted(idle, key=lambda model: model.used_at)

    def _had_their_turn(self, newcomer: _Model, now: float) -> list[_Model]:
        """Those that are in use and may be held for the sake of `newcomer`, the longest loaded first."""
        if newcomer.waited_s(now) < TURN_S:
            return []
        return sorted(
            (
                model
                for model in self._models.values()
                if model.wanted
                and not model.state.resident
                and (model.use.aboard or model.use.waiting_since is not None)
                and model.loaded_at is not None
                and now - model.loaded_at >= TURN_S
            ),
            key=lambda model: model.loaded_at or 0.0,
        )

    # --- bytes ---

    def _size(self, model: _Model) -> int:
        """What it takes or will take. One whose size nobody knows gets all that residents leave, until it is
        loaded."""
        assert self._budget is not None
        if model.use.loaded:
            return model.held_bytes
        if model.estimate is not None:
            return model.estimate
        return max(0, self._budget - self._residents())

    def _taken(self) -> int:
        return sum(self._size(model) for model in self._models.values() if model.wanted or model.present)

    def _going(self) -> int:
        """What those will give back that are told to end."""
        going = [model for model in self._models.values() if model.present and not model.wanted]
        return sum(map(self._size, going))


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
