"""The models that can be asked for: their names, and whether a worker is there or is to be started. Pure.

A gateway with a supervisor hears from it which models are configured (`protocol.orders`). Where they are
started on demand, a request for one without a worker waits for it like a flight that has lost its own, and
`residency` decides who runs. A gateway without a supervisor knows the models that workers have named.
"""

from __future__ import annotations

from collections.abc import Callable

from broker.dispatch.fleet import Fleet, KnownModel, Vacancy, Worker
from broker.dispatch.flights import Flights
from broker.dispatch.residency import Residency, Use
from protocol.errors import Code, RequestError
from protocol.orders import ModelState, Orders, Roster

Tell = Callable[[Orders], None]
"""Tells the supervisor what it is to do; may be called with what was said before."""


class Catalogue:
    """Owns which workers are held, and what is asked of the supervisor."""

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
        """Of the models that the supervisor has named."""
        self._fleet = fleet
        self._flights = flights
        self._clock = clock
        self._tell = tell
        self._host = host
        self._unload_after_s = unload_after_s
        self._residency: Residency | None = None
        self._names: dict[str, str] = {}
        self._leaving: frozenset[int] = frozenset()

    def told(self, roster: Roster) -> None:
        """How the supervisor's models stand."""
        self.states = {state.name: state for state in roster.models}
        self._names = {alias: state.name for state in roster.models for alias in (state.name, *state.aliases)}
        self._leaving = frozenset(pid for state in roster.models for pid in state.leaving)
        if roster.on_demand:
            self._residency = self._residency or Residency(unload_after_s=self._unload_after_s)
            self._residency.told(roster, self._clock())
            for name in self.states:
                self._fleet.models.setdefault(name, KnownModel(first_seen_at=self._clock()))
        self.update()

    # --- what clients ask for ---

    @property
    def on_demand(self) -> bool:
        """Models are started when they are asked for."""
        return self._residency is not None

    def resolve(self, model: str | None) -> str | None:
        """The name a model is served under. None stands for the first one, where there is such an order."""
        if model is None:
            return next(iter(self.states)) if self.on_demand else None
        return self._names.get(model, model)

    def vacancy(self, name: str | None) -> Vacancy | None:
        """A place for requests to wait for a worker, where one is started for them and none serves.

        Raises `RequestError` for a model that cannot be had.
        """
        if self._residency is None or name not in self.states:
            return None
        if any(worker.serves and worker.model == name for worker in self._fleet):
            return None
        if (refusal := self._residency.refusal(name)) is not None:
            raise RequestError(Code.MODEL_FAILED, refusal)
        return self._fleet.vacancy(name)

    def state(self, name: str) -> str:
        """`loaded`, `loading`, `unloaded` or `failed`."""
        if any(worker.fit and worker.model == name for worker in self._fleet):
            return "loaded"
        if name not in self.states:
            return "loading" if any(worker.model == name for worker in self._fleet) else "unloaded"
        stage = self.states[name].stage
        return {"running": "loading", "failed": "failed"}.get(stage, "unloaded")

    # --- what becomes of it ---

    def update(self) -> None:
        """Decide anew. To be called when something has changed, and now and then."""
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
            serving = sorted(worker.pid for worker in local if worker.ready is not None)
            self._tell(Orders(wanted=wanted, serving=serving, idle=self._idle()))

    def _idle(self) -> list[int]:
        local = filter(self._is_local, self._fleet)
        leaving = [worker for worker in local if worker.pid in self._leaving]
        busy = {worker.pid for worker in leaving if self._flights.aboard(worker.incarnation)}
        return sorted(self._leaving - busy)

    def _is_local(self, worker: Worker) -> bool:
        """It may be a process of the supervisor's: on another machine the same number is another process."""
        return worker.host in ("", self._host) or not self._host

    def _use(self, name: str) -> Use:
        workers = [worker for worker in filter(self._is_local, self._fleet) if worker.model == name]
        waiting = self._flights.waiting(name)
        return Use(
            loaded=any(worker.fit for worker in workers),
            aboard=sum(len(self._flights.aboard(worker.incarnation)) for worker in workers),
            waiting_since=min((flight.waiting_since for flight in waiting), default=None),
            cache_bytes=sum(worker.cache_bytes for worker in workers),
        )

    def _fail_refused(self, residency: Residency) -> None:
        """Those who wait for a model that has turned out not to be had."""
        for flight in self._flights.waiting():
            if flight.model in self.states and (refusal := residency.refusal(flight.model)):
                flight.fail(Code.MODEL_FAILED, refusal)
