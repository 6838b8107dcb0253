"""Models and plans of a child: what is loaded first, the plan it runs by, and the effect of a reload."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from deploy.supervisor.child import Child, ServedModel, first_loaded, plans
from deploy.supervisor.events import ReloadAsked
from deploy.supervisor.reloading import ReloadOrder, Reloads
from protocol.settings.worker import WorkerSettings


def chain(*fallback: str) -> Child:
    model = ServedModel(name="big", model="big", fallback=fallback)
    child: Child | None = None
    for each in reversed([model, *plans(model)]):
        child = Child("worker", ["worker"], {}, WorkerSettings(model=each.model), model=each, fallback=child)
    assert child is not None
    return child


def reloads(child: Child) -> Reloads:
    return Reloads([Child("gateway", [], {}), child])


def runs(made: Reloads) -> str | None:
    child = made.programs["worker"]
    assert isinstance(child.settings, WorkerSettings)
    assert child.model is not None
    assert child.settings.model == child.model.model
    return child.settings.model


def reloaded(made: Reloads, *, done: bool, swap_for: str | None = None) -> ReloadAsked:
    assert made.begin(ReloadOrder(swap_for=swap_for), ["worker"]) is None
    asked = made.ask("worker", runs=True, beside=False)
    assert made.ended(done, "") == (done, "")
    return asked


def test_a_reload_brings_the_first_plan_back_or_leaves_what_runs() -> None:
    made = reloads(chain("less", "least"))
    made.fall("worker")
    assert reloaded(made, done=False) == ReloadAsked("worker", beside=False, swap=True, plans=2)
    assert runs(made) == "less"
    reloaded(made, done=True)
    assert runs(made) == "big"
    assert reloaded(made, done=True) == ReloadAsked("worker", beside=False, swap=False, plans=2)


def test_a_model_that_was_swapped_in_is_the_first_plan_from_then_on() -> None:
    made = reloads(chain("less", "least"))
    made.fall("worker")
    assert reloaded(made, done=True, swap_for="new") == ReloadAsked("worker", False, swap=True, plans=1)
    made.fall("worker")
    assert runs(made) == "least"
    reloaded(made, done=True)
    assert runs(made) == "new"


def test_settings_that_were_read_again_are_those_of_the_next_reload_and_not_of_a_restart() -> None:
    made = reloads(chain("less"))

    def running() -> int:
        settings = made.programs["worker"].settings
        assert isinstance(settings, WorkerSettings)
        return settings.max_running

    def refresh(max_running: int, *running: str, name: str = "big") -> None:
        child = chain("less")
        assert isinstance(child.settings, WorkerSettings)
        own = {"max_running": max_running}
        model = ServedModel(name=name, model="big", fallback=("less",), settings=own)
        settings = replace(child.settings, max_running=max_running)
        child = dataclasses.replace(child, settings=settings, model=model)
        made.refresh([Child("gateway", [], {}), child], running)

    refresh(3, "worker")
    assert running() == 16
    assert not reloaded(made, done=True).swap
    assert running() == 3
    refresh(4)
    assert running() == 4, "it does not run, so its next start is its first with them"
    refresh(5, name="other")
    assert running() == 4, "names of models are read only once"
    reloaded(made, done=True, swap_for="new")
    refresh(6, "worker")
    reloaded(made, done=True)
    assert (runs(made), running()) == ("new", 6)


def test_it_starts_with_the_residents_or_else_with_the_first() -> None:
    plain = [ServedModel(name=name) for name in ("a", "b")]
    resident = ServedModel(name="c", resident=True)
    assert first_loaded(plain) == plain[:1]
    assert first_loaded([*plain, resident]) == [resident]
    assert first_loaded([]) == []
