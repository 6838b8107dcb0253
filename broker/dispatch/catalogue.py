"""Catalogue of the models that can be requested: names, aliases and loading on demand. Pure.

The supervisor reports which models are configured (`protocol.supervisor_messages`). With loading on demand, a
request for an unloaded model waits like a flight whose worker was lost, and `residency` decides which models
run. Without a supervisor, the catalogue holds the models that workers have reported.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence

from broker.dispatch.fleet import Fleet, ModelEntry, UnloadedModel, Worker, unknown_model, unseen
from broker.dispatch.flight import Flight
from broker.dispatch.flights import Flights
from broker.dispatch.residency import ModelDemand, Residency
from protocol.errors import Code, RequestError
from protocol.messages import Ready
from protocol.supervisor_messages import (
    PULLS_MAX,
    DesiredModels,
    ModelState,
    ModelStates,
    Pull,
    PullState,
    ReadyWorker,
)
from protocol.tasks import Task, tasks

LOAD_ORDER_S_MAX = 300.0
"""Time that an order to load a model lasts while its memory is in use."""

Tell = Callable[[DesiredModels], None]
"""Sends the desired state to the supervisor; may be called with an unchanged one."""


LATEST = ":latest"


class Catalogue:
    """Model names, `Worker.held`, and the desired state that is sent to the supervisor."""

    def __init__(
        self,
        fleet: Fleet,
        flights: Flights,
        clock: Callable[[], float],
        *,
        unload_after_s: float | None = None,
        tell: Tell | None = None,
        host: str = "",
    ) -> None:
        self.states: dict[str, ModelState] = {}
        """States of the supervisor's models, by name."""
        self.memory_budget: int | None = None
        self.pulls = Pulls(lambda: f"pull_{secrets.token_hex(8)}")
        self.expected = ExpectedWorkers(fleet, clock)
        self._fleet = fleet
        self._flights = flights
        self._clock = clock
        self._tell = tell
        self._host = host
        self._unload_after_s = unload_after_s
        self._residency: Residency | None = None
        self._names: dict[str, str] = {}
        self._leaving: frozenset[int] = frozenset()
        self._load_orders: dict[str, float] = {}
        """Models to load without a request, with the times of the orders."""

    def on_model_states(self, model_states: ModelStates) -> None:
        """Apply the model states that the supervisor reports."""
        self.states = {state.name: state for state in model_states.models}
        self.memory_budget = model_states.memory_budget
        self.pulls.on_states(model_states.pulls)
        self._names = {
            alias: state.name for state in model_states.models for alias in (state.name, *state.aliases)
        }
        for state in model_states.models:
            (self.expected.add if state.loaded else self.expected.forget)(state.name)
        self._leaving = frozenset(pid for state in model_states.models for pid in state.leaving)
        if model_states.on_demand:
            self._residency = self._residency or Residency(unload_after_s=self._unload_after_s)
            self._residency.on_model_states(model_states, self._clock())
            for name in self.states:
                self._fleet.models.setdefault(name, ModelEntry(first_seen_at=self._clock()))
        self.update()

    def expect(self, ready: Ready) -> None:
        """Expect a worker of a model that the gateway before this one served, unless the supervisor knows."""
        state = self.states.get(ready.model)
        if state.loaded if state is not None else not self.states:
            self.expected.add(ready.model, ready)

    # --- requests ---

    @property
    def on_demand(self) -> bool:
        """Whether models are loaded on demand."""
        return self._residency is not None

    def resolve(self, model: str) -> str:
        """Return the name behind an alias, also with Ollama's tag `:latest`, or the name itself."""
        named = (self._names.get(name, name) for name in (model, model.removesuffix(LATEST)))
        return next((name for name in named if name in self._fleet.models), self._names.get(model, model))

    def default_model(self, task: Task) -> str | None:
        """Return the model for a request that names none. None: any that serves, preferably for `task`.

        With loading on demand, the first configured model for the task, loaded or not: what is loaded
        changes, and requests alike go to one model.
        """
        serving = [worker for worker in self._fleet if worker.serves]
        if not self.on_demand and any(task in tasks(worker.capabilities) for worker in serving):
            return None
        names = list(self.states if self.on_demand else self._fleet.models)
        known = {name: self._tasks(name) for name in names}
        able = [name for name in names if task in known[name]]
        unknown = [name for name in names if not known[name]]
        return next(iter((*able, *unknown, *names[: self.on_demand])), None)

    def _tasks(self, name: str) -> list[Task]:
        """Return the tasks of a model, loaded or not; empty: unknown."""
        entry, state = self._fleet.models.get(name), self.states.get(name)
        if entry is not None and entry.last is not None:
            return tasks(entry.last.capabilities)
        return [state.task] if state is not None and state.task is not None else []

    def unloaded(self, name: str | None) -> UnloadedModel | None:
        """Return the model as unloaded if it is loaded on demand and no worker serves it, else None.

        Raises `RequestError` for a model that cannot be loaded.
        """
        if self._residency is None or name not in self.states:
            return None
        if any(worker.serves and worker.model == name for worker in self._fleet):
            return None
        if (refusal := self._residency.refusal(name)) is not None:
            raise RequestError(Code.MODEL_FAILED, refusal)
        return self._fleet.unloaded(name)

    def state(self, name: str) -> str:
        """Return `loaded`, `loading`, `unloaded` or `failed`."""
        if any(worker.fit and worker.model == name for worker in self._fleet):
            return "loaded"
        if name not in self.states:
            return "loading" if any(worker.model == name for worker in self._fleet) else "unloaded"
        stage = self.states[name].stage
        return {"running": "loading", "failed": "failed"}.get(stage, "unloaded")

    def cache_bytes_max(self, worker: Worker) -> int | None:
        """Return how far the worker's caches can grow if those of all other workers grow alike.

        A worker knows only the budget of all models, so its own limit counts as if it were alone.
        """
        own = worker.ready.cache_bytes_max if worker.ready is not None else None
        unused = self._residency.unused_bytes() if self._residency is not None else None
        if own is None or unused is None or not self._is_local(worker):
            return own
        loaded = [other for other in self._fleet if other.fit and self._is_local(other)]
        return min(own, worker.cache_bytes + unused // max(1, len(loaded)))

    def is_on_demand(self, name: str) -> bool:
        """Return whether a model is loaded and unloaded by demand."""
        return self.on_demand and name in self.states and not self.states[name].resident

    # --- orders of an operator ---

    def load(self, model: str) -> str:
        """Have a model loaded as if a request waited for it; return its name. Raises `RequestError`."""
        name = self._configured(model)
        if self.unloaded(name) is not None:
            self._load_orders.setdefault(name, self._clock())
            self.update()
        return name

    def unload(self, model: str) -> str:
        """Have an idle model unloaded, or not loaded; return its name. Raises `RequestError`."""
        name = self._configured(model)
        if self._residency is None or not self.is_on_demand(name):
            raise RequestError(
                Code.INVALID_REQUEST,
                f"The model `{name}` is not loaded on demand, so it stays in memory.",
                param="model",
            )
        if self._residency.is_pinned(name):
            message = f"The model `{name}` is pinned: unpin it first."
            raise RequestError(Code.MODEL_IN_USE, message, param="model")
        self._load_orders.pop(name, None)
        use = self._use(name)
        if use.assigned or use.waiting_since is not None:
            raise RequestError(
                Code.MODEL_IN_USE, f"The model `{name}` has requests in flight.", param="model"
            )
        self._residency.unload(name)
        self.update()
        return name

    def pin(self, model: str) -> str:
        """Have a model loaded and never unloaded; return its name. Raises `RequestError`, so too if it does
        not fit beside those that stay."""
        name = self.load(model)
        if self._residency is not None and self.is_on_demand(name):
            self._residency.pin(name)
            self.update()
        return name

    def unpin(self, model: str) -> str:
        """Let a pinned model be unloaded again; return its name. Raises `RequestError`."""
        name = self._configured(model)
        if self._residency is not None and self.is_on_demand(name):
            self._residency.unpin(name)
            self.update()
        return name

    def is_pinned(self, name: str) -> bool:
        return self._residency is not None and name in self.states and self._residency.is_pinned(name)

    def _configured(self, model: str) -> str:
        name = self.resolve(model)
        if name not in self._fleet.models:
            raise unknown_model(model, self._fleet.models)
        return name

    def _load_order_since(self, name: str, *, loaded: bool) -> float | None:
        """Return the time of the order to load a model; None if there is none, or it has ended."""
        since = self._load_orders.get(name)
        if since is None:
            return None
        if loaded or self.states[name].stage == "failed" or self._clock() - since >= LOAD_ORDER_S_MAX:
            del self._load_orders[name]
            return None
        return since

    # --- decisions ---

    def update(self) -> None:
        """Recompute the desired state. Call this after every change, and periodically."""
        wanted = None
        held: frozenset[str] = frozenset()
        if self._residency is not None:
            uses = {name: self._use(name) for name in self.states}
            decision = self._residency.decide(uses, self._clock())
            wanted, held = sorted(decision.wanted), decision.held | (self.states.keys() - decision.wanted)
            self._fail_refused(self._residency)
        for worker in self._fleet:
            leaves = worker.pid in self._leaving or worker.model in held
            worker.held = leaves and self._is_local(worker)
        if self._tell is not None:
            local = filter(self._is_local, self._fleet)
            ready = [worker for worker in local if worker.ready is not None]
            reported = (ReadyWorker(worker.pid, worker.model, worker.identity) for worker in ready)
            workers = sorted(reported, key=lambda worker: worker.pid)
            desired = DesiredModels(
                wanted=wanted,
                serving=[worker.pid for worker in workers],
                workers=workers,
                idle=self._idle(),
                pulls=self.pulls.wanted,
            )
            self._tell(desired)

    def _idle(self) -> list[int]:
        local = filter(self._is_local, self._fleet)
        leaving = [worker for worker in local if worker.pid in self._leaving]
        busy = {worker.pid for worker in leaving if self._flights.assigned(worker.incarnation)}
        return sorted(self._leaving - busy)

    def _is_local(self, worker: Worker) -> bool:
        """Return whether it may be the supervisor's process; process ids of other machines must not match."""
        return worker.host in ("", self._host) or not self._host

    def _use(self, name: str) -> ModelDemand:
        workers = [worker for worker in filter(self._is_local, self._fleet) if worker.model == name]
        loaded = any(worker.fit for worker in workers)
        waits = [flight.waiting_since for flight in self._flights.waiting(name)]
        if (ordered_at := self._load_order_since(name, loaded=loaded)) is not None:
            waits.append(ordered_at)
        return ModelDemand(
            loaded=loaded,
            assigned=sum(len(self._flights.assigned(worker.incarnation)) for worker in workers),
            waiting_since=min(waits, default=None),
            cache_bytes=sum(worker.cache_bytes for worker in workers),
        )

    def _fail_refused(self, residency: Residency) -> None:
        """Fail the flights that wait for a model that cannot be loaded."""
        for flight in self._flights.waiting():
            if flight.model in self.states and (refusal := residency.refusal(flight.model)):
                flight.fail(Code.MODEL_FAILED, refusal)


# --- Expected workers: those that outlived the gateway before this one, and have not connected yet ---
#
# Workers connect within a moment of a gateway's start, or its requests would be refused though nothing is
# wrong. So for a short time, requests wait for a model of which the supervisor says that a worker has loaded
# it, or, where there is none, of which the journal says that it was served last.

CONNECT_S_MAX = 10.0
"""Time in seconds from the gateway's start for workers to connect."""


class ExpectedWorkers:
    """The models whose workers are expected."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._until = clock() + CONNECT_S_MAX
        self._models: dict[str, Ready] = {}
        """What is known of each: the `Ready` of its last worker, or assumptions."""
        self._waiting: set[Flight] = set()

    def add(self, model: str, ready: Ready | None = None) -> None:
        """Expect a worker of `model`. `ready`: that of its last one, if it is known."""
        if self._clock() < self._until and all(worker.model != model for worker in self._fleet):
            self._models[model] = ready or self._models.get(model) or unseen(model)
            self._fleet.models.setdefault(model, ModelEntry(first_seen_at=self._clock()))

    def find(self, model: str | None, task: Task) -> UnloadedModel | None:
        """Return the model if its worker is expected. None as `model`: any model, if no worker serves yet."""
        if model is None and any(worker.serves for worker in self._fleet):
            return None
        for name, ready in self._models.items():
            if model == name or (model is None and task in tasks(ready.capabilities)):
                return UnloadedModel(name, ready)
        return None

    def forget(self, model: str) -> None:
        """Expect no worker of `model`: one has connected, or there is none."""
        self._models.pop(model, None)

    def note(self, model: str, flights: Iterable[Flight]) -> None:
        """Note new flights, which wait if a worker of `model` is expected."""
        if model in self._models:
            self._waiting.update(flights)

    def sweep(self, find: Callable[[str], object]) -> list[str]:
        """Forget the models whose workers had the time to connect, and have not; return them.

        Fails the flights that would be refused now, because of that or because their worker loads its model
        anew. `find`: raises `RequestError` for a model that is not served.
        """
        is_over = self._clock() >= self._until
        late = self._forget_late() if is_over else []
        for flight in list(self._waiting):
            if flight.was_placed or flight.terminal is not None:
                self._waiting.discard(flight)
                continue
            try:
                find(flight.model)
            except RequestError as refusal:
                flight.fail(refusal.code, refusal.message)
        if is_over:  # what is left has been refused, is placed by now, or its client has left
            self._waiting.clear()
        return late

    def _forget_late(self) -> list[str]:
        late, self._models = list(self._models), {}
        for model in late:
            if self._fleet.models[model].last is None:  # nothing else has it
                del self._fleet.models[model]
        return late


# --- Downloads of models that clients order; the supervisor carries them out -------------------------
#
# The desired downloads are sent as a whole, and their states reported as a whole. Those of a previous gateway
# are adopted. A finished one is remembered until `REMEMBERED_MAX` newer ones are ordered.

REMEMBERED_MAX = 16
MODEL_CHARACTERS_MAX = 200
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Pulls:
    """Desired and observed downloads, by the id of the order. `wanted`: None until there was an order."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self.wanted: list[Pull] | None = None
        self._make_id = make_id
        self._states: dict[str, PullState] = {}
        self._is_possible = False

    def on_states(self, states: Sequence[PullState] | None) -> None:
        """Apply the reported states; those that have ended are not wanted any more."""
        self._is_possible = states is not None
        if self.wanted is None:
            self.wanted = [Pull(id=state.id, model=state.model) for state in states or ()] or None
        for state in states or ():
            if self._is_wanted(
                state.id
            ):  # otherwise it was cancelled, or has finished, and is still reported
                self._states[state.id] = state
        self.wanted = self.wanted and [pull for pull in self.wanted if self._runs(pull.id)]

    def order(self, model: str) -> PullState:
        """Order a download; return the running one if there is one. Raises `RequestError`."""
        if len(model) > MODEL_CHARACTERS_MAX or not _MODEL.fullmatch(model):
            message = f"'model' must be a model of the hub, as OWNER/NAME; it is {model[:64]!r}."
            raise RequestError(Code.INVALID_REQUEST, message, param="model")
        if not self._is_possible:
            message = (
                "Models are downloaded only by `roundhouse serve`: run `roundhouse pull` on the machine."
            )
            raise RequestError(Code.INVALID_REQUEST, message, param="model")
        wanted = self.wanted or []
        for pull in wanted:
            if pull.model == model:
                return self._states[pull.id]
        if len(wanted) >= PULLS_MAX:
            message = f"{PULLS_MAX} models are being downloaded already."
            raise RequestError(Code.TOO_MANY_CONNECTIONS, message, retry_after_s=30.0)
        new = Pull(id=self._make_id(), model=model)
        self.wanted = [*wanted, new]
        self._states[new.id] = PullState(id=new.id, model=model)
        while len(self._states) > REMEMBERED_MAX:
            del self._states[next(id for id in self._states if not self._is_wanted(id))]
        return self._states[new.id]

    def cancel(self, id: str) -> PullState:
        """Cancel a download; return its last state. What has arrived stays, and is continued by the next
        order. Raises `RequestError` if it is not known."""
        state = self.state(id)
        if self._is_wanted(id):
            self.wanted = [pull for pull in self.wanted or () if pull.id != id]
            cancelled = PullState(
                id=id,
                model=state.model,
                stage="failed",
                done_bytes=state.done_bytes,
                total_bytes=state.total_bytes,
                failure="It was cancelled.",
            )
            self._states[id] = cancelled
        return self._states[id]

    def state(self, id: str) -> PullState:
        """Return a download. Raises `RequestError` if it is not known."""
        if (state := self._states.get(id)) is None:
            raise RequestError(Code.ROUTE_NOT_FOUND, f"No download `{id[:64]}` is known.", param="id")
        return state

    def states(self) -> list[PullState]:
        """Return all known downloads, the oldest first."""
        return list(self._states.values())

    def _is_wanted(self, id: str) -> bool:
        return any(pull.id == id for pull in self.wanted or ())

    def _runs(self, id: str) -> bool:
        return self._states[id].stage == "running"
