"""Residency of models, with a simple simulation of supervisor, workers and clients."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.dispatch.residency import PAUSE_S, TURN_S, Decision, ModelDemand, Residency
from protocol.supervisor_messages import ModelState, ModelStates, Stage


class World:
    """Models by name and weight, their processes, and their numbers of assigned and waiting requests."""

    def __init__(
        self,
        weights: dict[str, int],
        *,
        budget: int | None = 10,
        unload_after_s: float | None = None,
        resident: tuple[str, ...] = (),
        known: bool = True,
        broken: tuple[str, ...] = (),
    ) -> None:
        self.now = 1000.0
        self.weights, self.budget, self.resident, self.known = weights, budget, resident, known
        self.broken = broken
        self.failures: dict[str, str] = {}
        self.stage: dict[str, Stage] = dict.fromkeys(weights, "parked")
        self.ready: set[str] = set()
        self.assigned: Counter[str] = Counter()
        self.waiting: dict[str, list[float]] = {name: [] for name in weights}
        self.loads: Counter[str] = Counter()
        self.residency = Residency(unload_after_s=unload_after_s)
        self.decision = Decision(frozenset(), frozenset())
        self.report()

    def report(self) -> None:
        """Report the models' states, as the supervisor."""
        states = [
            ModelState(
                name=name,
                stage=self.stage[name],
                resident=name in self.resident,
                weight_bytes=weight if self.known and name not in self.broken else None,
                failure=self.failures.get(name, ""),
                memory_bytes=weight if name in self.ready else 0,
            )
            for name, weight in self.weights.items()
        ]
        self.residency.on_model_states(
            ModelStates(models=states, on_demand=True, memory_budget=self.budget), self.now
        )
        self.decide()

    def use(self, name: str) -> ModelDemand:
        waiting = self.waiting[name]
        return ModelDemand(name in self.ready, self.assigned[name], waiting[0] if waiting else None)

    def decide(self) -> None:
        """Decide which models are wanted, as the gateway does after each event."""
        before = self.decision.wanted
        self.decision = self.residency.decide({name: self.use(name) for name in self.weights}, self.now)
        for name in before - self.decision.wanted:
            assert not self.assigned[name], "a model with assigned requests is ended"
            assert name not in self.resident, "a resident model is ended"
        for name in self.weights:
            if self.stage[name] == "failed":
                self.waiting[name].clear()  # they get the failure as an error
            if name in self.ready and name in self.decision.wanted - self.decision.held:
                self.assigned[name] += len(self.waiting[name])
                self.waiting[name].clear()

    # --- events ---

    def ask(self, name: str) -> None:
        self.waiting[name].append(self.now)
        self.decide()

    def finish(self, name: str) -> None:
        self.assigned[name] -= 1
        self.decide()

    def obey(self) -> None:
        """Start and end processes as decided, as the supervisor."""
        for name in self.weights:
            if name in self.decision.wanted and self.stage[name] == "parked":
                self.stage[name] = "running"
                self.loads[name] += 1
            elif name not in self.decision.wanted and self.stage[name] == "running":
                self.stage[name] = "ending"
                self.ready.discard(name)
        self.report()

    def progress(self) -> None:
        """Complete all loads and all ends; broken models fail."""
        for name, stage in self.stage.items():
            if stage == "running" and name in self.broken:
                self.stage[name], self.failures[name] = "failed", "no such model"
            elif stage == "running":
                self.ready.add(name)
            elif stage == "ending":
                self.stage[name] = "parked"
        self.report()

    def settle(self) -> None:
        for _ in range(6):
            self.obey()
            self.progress()

    def serve(self, name: str) -> None:
        """Serve one request of the model to its end."""
        self.ask(name)
        self.settle()
        assert self.assigned[name]
        self.finish(name)
        self.now += PAUSE_S

    def retry(self) -> None:
        """End the pauses of failed models, as the supervisor."""
        for name, stage in self.stage.items():
            if stage == "failed":
                self.stage[name] = "parked"
        self.report()

    @property
    def taken(self) -> int:
        return sum(
            weight
            for name, weight in self.weights.items()
            if name not in self.broken
            and (name in self.decision.wanted or self.stage[name] in ("running", "ending"))
        )


def test_a_pinned_model_is_not_unloaded_for_time_or_for_memory() -> None:
    world = World({"a": 4, "b": 4, "c": 4, "large": 8, "huge": 11}, unload_after_s=60.0)
    assert "budget" in (world.residency.refusal("huge") or "")
    assert world.residency.refusal("large") is None
    world.serve("a")
    world.residency.pin("a")
    assert "leaves" in (world.residency.refusal("large") or ""), "it does not fit beside the pinned one"
    assert world.residency.refusal("a") is None
    world.now += 10_000
    world.serve("b")
    world.serve("c")
    assert world.ready >= {"a", "c"}
    assert world.residency.refusal("b") is None
    world.residency.unpin("a")
    world.now += 10_000
    world.settle()
    assert world.ready == set()


def test_room_is_made_by_the_one_unused_for_longest_and_never_by_a_resident_one() -> None:
    world = World({"a": 4, "b": 4, "c": 4, "resident": 5}, budget=15, resident=("resident",))
    assert world.decision.wanted == {"resident"}
    for name in ("a", "b", "a"):
        world.serve(name)
        world.now += 10_000
        world.settle()
    assert world.ready == {"a", "b", "resident"}
    world.serve("c")
    assert world.ready == {"a", "c", "resident"}
    uses = {name: ModelDemand(loaded=name in world.ready) for name in world.weights}
    uses["a"] = ModelDemand(loaded=True, assigned=1, cache_bytes=3)
    assert world.residency.decide(uses, world.now).wanted == {"a", "resident"}, "its caches have grown"


@pytest.mark.parametrize("resident", [("broken",), ()], ids=["resident", "on demand"])
def test_model_that_cannot_be_loaded_keeps_no_memory_from_others(resident: tuple[str, ...]) -> None:
    world = World({"broken": 10, "good": 6}, resident=resident, broken=("broken",))
    world.ask("broken")
    world.settle()
    assert world.stage["broken"] == "failed"
    world.serve("good")
    for _ in range(3):
        world.retry()
        world.ask("broken")
        world.settle()
        assert world.ready == {"good"}, "a retry costs another model its place"
        world.serve("good")
    assert world.loads["good"] == 1


def test_one_of_unknown_size_is_loaded_alone_the_first_time() -> None:
    world = World({"a": 3, "b": 3}, known=False)
    world.serve("a")
    world.ask("b")
    world.settle()
    assert world.ready == {"b"}
    world.finish("b")
    world.now += PAUSE_S
    # Both sizes are known now, so they fit together.
    world.serve("a")
    assert world.ready == {"a", "b"}


def test_small_model_may_overtake_a_waiting_large_model_for_one_turn_only() -> None:
    world = World({"large": 8, "used": 5, "small": 2, "tiny": 1})
    world.ask("used")
    world.settle()
    world.ask("large")
    world.ask("small")
    assert "small" in world.decision.wanted
    world.now += TURN_S
    world.ask("tiny")
    assert "tiny" not in world.decision.wanted


def test_models_in_constant_use_alternate_without_thrashing() -> None:
    names = "abc"
    world = World(dict.fromkeys(names, 6))
    for name in names:
        world.ask(name)
    served: Counter[str] = Counter()
    for _ in range(1200):
        world.now += 0.5
        world.obey()
        world.progress()
        for name in names:
            # Each model has a client that asks again right before its answer ends.
            if world.assigned[name]:
                served[name] += 1
                world.ask(name)
                world.finish(name)
    assert set(served) == set(names)
    assert min(served.values()) > max(served.values()) / 2
    assert sum(world.loads.values()) <= 600 / TURN_S + len(names)


class AnyHistory(RuleBasedStateMachine):
    """Stateful test: any requests, with supervisor and workers of any speed."""

    @initialize(
        weights=st.lists(st.integers(1, 6), min_size=2, max_size=5),
        residents=st.sampled_from([0, 0, 1]),
        unload_after_s=st.sampled_from([None, 30.0]),
        broken=st.sets(st.integers(0, 4), max_size=2),
    )
    def begin(
        self, weights: list[int], residents: int, unload_after_s: float | None, broken: set[int]
    ) -> None:
        names = [f"m{number}" for number in range(len(weights))]
        self.world = World(
            dict(zip(names, weights, strict=True)),
            unload_after_s=unload_after_s,
            resident=tuple(names[:residents]),
            budget=10 + residents * 6,
            broken=tuple(name for number, name in enumerate(names) if number in broken),
        )
        self.names = st.sampled_from(names)

    @rule(data=st.data())
    def one_asks(self, data: st.DataObject) -> None:
        self.world.ask(data.draw(self.names))

    @precondition(lambda self: +self.world.assigned)
    @rule(data=st.data())
    def one_is_done(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(sorted(+self.world.assigned))))

    @rule()
    def the_supervisor_acts(self) -> None:
        self.world.obey()

    @rule()
    def processes_get_on(self) -> None:
        self.world.progress()

    @precondition(lambda self: "failed" in self.world.stage.values())
    @rule()
    def pauses_end(self) -> None:
        self.world.retry()

    @rule(seconds=st.floats(0.1, 60))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.decide()

    @precondition(lambda self: self.world.ready)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        world = self.world
        name = data.draw(st.sampled_from(sorted(world.ready)))
        world.ready.discard(name)
        world.waiting[name] += [world.now] * world.assigned.pop(name, 0)
        world.report()

    @invariant()
    def all_of_it_fits(self) -> None:
        assert self.world.taken <= (self.world.budget or 0)

    @invariant()
    def who_is_held_has_somebody_to_make_room_for(self) -> None:
        decision = self.world.decision
        assert decision.held <= decision.wanted
        assert not decision.held & set(self.world.resident)

    def teardown(self) -> None:
        """Check that every waiting request is served once running requests end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(10 * len(world.weights)):
            world.now += TURN_S / 2
            world.settle()
            self.all_of_it_fits()
            for name in list(+world.assigned):
                while world.assigned[name]:
                    world.finish(name)
        assert not any(world.waiting.values())


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=20, deadline=None)
