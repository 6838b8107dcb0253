"""Residency: which models are in memory. Pure: demand, sizes and time go in, the models to run come out.

A model is loaded when a request waits for it, and stays until its memory is needed or it was idle for too
long. Memory is freed by unloading idle models, least recently used first. If all others are in use, they take
turns: the one loaded longest ago is *held*: it gets no new requests, and is unloaded when its requests have
finished. Invariants:

* wanted models and those not yet unloaded fit into the budget, as far as sizes are known in advance;
* a model with requests in flight is never unloaded, nor a resident or a pinned one;
* the model whose requests have waited longest is next, and after `TURN_S` no smaller one overtakes it: every
  model that fits at all is served eventually, if requests end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.supervisor_messages import ModelState, ModelStates

TURN_S = 20.0
"""Minimum turn of a model in use while another waits, and the wait before that one claims memory."""
PAUSE_S = 1.0
"""Gap between requests during which a model still counts as used within its turn."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Demand for a model. `loaded`: a worker could serve it. `assigned`: requests dispatched to workers.

    `waiting_since`: start of the oldest wait for a worker; None: no request waits. `cache_bytes`: caches.
    """

    loaded: bool = False
    assigned: int = 0
    waiting_since: float | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`wanted`: models to run. `held`: models that get no new requests, so that they can be unloaded."""

    wanted: frozenset[str]
    held: frozenset[str]


@dataclass(slots=True)
class _Model:
    """State of a model. `weight`: memory of its process just after loading."""

    state: ModelState
    wanted: bool
    used_at: float
    loaded_at: float | None = None
    weight: int | None = None
    use: ModelDemand = ModelDemand()
    pinned: bool = False

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def stays(self) -> bool:
        """Whether it is never unloaded."""
        return self.state.resident or self.pinned

    @property
    def present(self) -> bool:
        return self.state.stage in ("running", "ending")

    @property
    def estimate(self) -> int | None:
        """Expected memory in bytes once loaded; None: unknown."""
        known = [size for size in (self.weight, self.state.weight_bytes) if size is not None]
        return max(known, default=None)

    @property
    def held_bytes(self) -> int:
        """Memory in bytes while loaded. A discrete GPU is not part of the process's memory, so caches are
        added to the estimate."""
        return max(self.state.memory_bytes, (self.estimate or 0) + self.use.cache_bytes)

    def waited_s(self, now: float) -> float:
        return 0.0 if self.use.waiting_since is None else now - self.use.waiting_since

    def is_used(self, now: float) -> bool:
        """Return whether a request waits for it, or one has just ended within its turn."""
        has_turn = self.loaded_at is not None and now - self.loaded_at < TURN_S
        return self.use.waiting_since is not None or (has_turn and now - self.used_at < PAUSE_S)

    @property
    def may_end(self) -> bool:
        return self.wanted and not self.stays and not self.use.assigned


class Residency:
    """The models of one supervisor. `unload_after_s`: idle time; None: unload only for memory."""

    def __init__(self, *, unload_after_s: float | None) -> None:
        self._unload_after_s = unload_after_s
        self._budget: int | None = None
        self._models: dict[str, _Model] = {}

    def on_model_states(self, model_states: ModelStates, now: float) -> None:
        """Apply the supervisor's model states. Models that run at the first report count as wanted."""
        self._budget = model_states.memory_budget
        for state in model_states.models:
            if (model := self._models.get(state.name)) is None:
                wanted = state.resident or state.stage == "running"
                self._models[state.name] = _Model(state, wanted, used_at=now)
                continue
            model.state = state
            if model.use.loaded and model.weight is None:
                model.weight = state.memory_bytes or None

    def refusal(self, name: str) -> str | None:
        """Return why the model cannot be loaded; None if its requests may wait for it."""
        model = self._models[name]
        if model.state.stage == "failed":
            return f"The model `{name}` cannot be loaded: {model.state.failure or 'see the log.'}"
        if self._budget is None or model.stays:
            return None
        least = sum(other.estimate or 0 for other in self._models.values() if other.stays)
        needed, room = model.state.weight_bytes or 0, self._budget - least
        if needed > room:
            return f"The model `{name}` needs {_gb(needed)}, but the memory budget leaves {_gb(room)} for it."
        return None

    def unused_bytes(self) -> int | None:
        """Return what is left of the memory budget; None: there is none."""
        return None if self._budget is None else max(0, self._budget - self._taken())

    def pin(self, name: str) -> None:
        """Never unload a model from now on. Until the gateway ends: pins are not stored."""
        self._models[name].pinned = True

    def unpin(self, name: str) -> None:
        """Let a model be unloaded again; a resident one stays."""
        self._models[name].pinned = False

    def is_pinned(self, name: str) -> bool:
        return self._models[name].pinned

    def unload(self, name: str) -> None:
        """Unload a model that has no requests; the next one for it loads it again."""
        self._models[name].wanted = self._models[name].state.resident

    def _residents(self) -> int:
        """Return the memory of the models that stay."""
        return sum(
            model.held_bytes if model.use.loaded else model.estimate or 0
            for model in self._models.values()
            if model.stays
        )

    def decide(self, uses: Mapping[str, ModelDemand], now: float) -> Decision:
        """Return the models to run and to hold from now on."""
        for model in self._models.values():
            self._observe(model, uses.get(model.name, ModelDemand()), now)
        self._end_unused(now)
        self._keep_within_budget(now)
        held = self._admit(now)
        wanted = frozenset(model.name for model in self._models.values() if model.wanted)
        return Decision(wanted, held)

    def _observe(self, model: _Model, use: ModelDemand, now: float) -> None:
        if model.state.stage == "failed":
            model.wanted = model.state.resident
        if use.assigned or use.waiting_since is not None:
            model.used_at = now
        if not use.loaded:
            model.loaded_at = None
        elif model.loaded_at is None:
            model.loaded_at = model.used_at = now
        if use.loaded and not model.use.loaded:
            model.weight = None  # measured again: it may be a different model now
        model.use = use

    def _end_unused(self, now: float) -> None:
        if self._unload_after_s is None:
            return
        for model in self._models.values():
            unused = model.use.waiting_since is None and now - model.used_at >= self._unload_after_s
            if model.may_end and model.loaded_at is not None and unused:
                model.wanted = False

    def _keep_within_budget(self, now: float) -> None:
        """Unload idle models if growing caches exceed the budget."""
        if self._budget is None:
            return
        for model in self._idle(now):
            if self._taken() - self._going() <= self._budget:
                return
            model.wanted = False

    # --- memory for waiting models ---

    def _admit(self, now: float) -> frozenset[str]:
        """Mark awaited models as wanted, in order; return the models that are held to free memory."""
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

    def _make_room(self, new_model: _Model, now: float) -> frozenset[str] | None:
        """Unload or hold models for `new_model`; return the held ones. None: not enough can be freed now."""
        assert self._budget is not None
        lacking = self._taken() - self._going() + self._size(new_model) - self._budget
        if lacking <= 0:
            return frozenset()  # enough models are being unloaded already
        idle, busy = self._idle(now), self._had_their_turn(new_model, now)
        if sum(map(self._size, [*idle, *busy])) < lacking:
            return None
        held = []
        for model in [*idle, *busy]:
            if lacking <= 0:
                break
            lacking -= self._size(model)
            if model.use.assigned:
                held.append(model.name)
            else:
                model.wanted = False
        return frozenset(held)

    def _idle(self, now: float) -> list[_Model]:
        """Return the idle models, least recently used first."""
        idle = [model for model in self._models.values() if model.may_end and not model.is_used(now)]
        return sorted(idle, key=lambda model: model.used_at)

    def _had_their_turn(self, new_model: _Model, now: float) -> list[_Model]:
        """Return the models in use that may be held for `new_model`, those loaded longest ago first."""
        if new_model.waited_s(now) < TURN_S:
            return []
        return sorted(
            (
                model
                for model in self._models.values()
                if model.wanted
                and not model.stays
                and (model.use.assigned or model.use.waiting_since is not None)
                and model.loaded_at is not None
                and now - model.loaded_at >= TURN_S
            ),
            key=lambda model: model.loaded_at or 0.0,
        )

    # --- bytes ---

    def _size(self, model: _Model) -> int:
        """Return its actual or expected memory. Until it is loaded, a model of unknown size is assumed to
        take all that resident models leave; none if it has failed to load, so that others are served."""
        assert self._budget is not None
        if model.use.loaded:
            return model.held_bytes
        if model.estimate is not None:
            return model.estimate
        if model.state.stage == "failed" or model.state.failure:
            return 0
        return max(0, self._budget - self._residents())

    def _taken(self) -> int:
        return sum(self._size(model) for model in self._models.values() if model.wanted or model.present)

    def _going(self) -> int:
        """Return the memory that models being unloaded will free."""
        going = [model for model in self._models.values() if model.present and not model.wanted]
        return sum(map(self._size, going))


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
