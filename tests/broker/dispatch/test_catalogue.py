"""Models loaded on demand: waiting requests, requests held during a swap, messages to the supervisor."""

from __future__ import annotations

from msgspec.structs import replace

from broker.dispatch.catalogue import LOAD_ORDER_S_MAX
from broker.dispatch.fleet import UnloadedModel, Worker
from protocol.errors import Code
from protocol.supervisor_messages import DesiredModels, ModelState, ModelStates, ReadyWorker, Stage
from tests.broker.dispatcher_line import Line, code_of, refusal
from tests.factories import accepted, events, finished, request

LOAD_S = 300.0


class Depot:
    """Dispatcher with a supervisor that has two models and one alias."""

    def __init__(self, *, budget: int | None = None, waiting_max: int = 8, **stages: Stage) -> None:
        self.line = Line(waiting_max=waiting_max)
        self.budget = budget
        self.models = {
            "a": ModelState(name="a", weight_bytes=6),
            "b": ModelState(name="b", weight_bytes=6, aliases=["alias"]),
        }
        self.tell(**stages)

    def tell(self, **stages: Stage) -> None:
        """Report the models' stages, as the supervisor."""
        for name, stage in stages.items():
            failure = "no such model" if stage == "failed" else ""
            self.models[name] = replace(self.models[name], stage=stage, failure=failure)
        self.line.dispatcher.catalogue.on_model_states(
            ModelStates(models=list(self.models.values()), on_demand=True, memory_budget=self.budget)
        )

    def wanted(self) -> list[str] | None:
        return self.line.told[-1].wanted


def test_a_request_for_one_that_is_not_loaded_waits_and_has_it_loaded() -> None:
    depot = Depot()
    line, dispatcher = depot.line, depot.line.dispatcher
    assert depot.wanted() == []
    assert dispatcher.find(None).model == "a"
    unknown = depot.line.refusal("c")
    assert unknown.code is Code.MODEL_NOT_FOUND
    assert "Available: a, b." in unknown.message
    found = dispatcher.find("alias")
    assert isinstance(found, UnloadedModel)
    assert found.capabilities.images, "unknown before the first load"
    assert refusal(dispatcher.clear("alias", "c0").__enter__).code is Code.WORKER_UNAVAILABLE
    with dispatcher.submit(found, [request("x")], ()) as [flight]:
        assert depot.wanted() == ["b"]
        error = refusal(dispatcher.catalogue.unload, "b")
        assert (error.code, error.param) == (Code.MODEL_IN_USE, "model")
        depot.tell(b="running")
        assert flight.attempt is None
        depot.line.serving("w", "b", pid=7)
        assert line.attempts_sent_to("w") == ["x"]
        line.say("w", accepted("w", "x"), events("w", "x", "hi"), finished("w", "x", tokens=1))
        assert flight.terminal is not None
    assert depot.wanted() == ["b"]
    assert isinstance(dispatcher.find("b"), Worker)
    for name in ("alias", None):
        with dispatcher.clear(name, f"clear {name}") as cache_clear:
            assert set(cache_clear.awaited) == {"w"}
    dispatcher.lost("w")
    found = dispatcher.find("b")
    assert isinstance(found, UnloadedModel)
    assert not found.capabilities.images, "as of the worker that is lost"
    assert found.ready.running_max == 4


def test_a_request_without_a_model_gets_the_first_one_for_its_task_loaded_or_not() -> None:
    dispatcher = Line().dispatcher
    models = [
        ModelState(name=name, task=task)  # type: ignore[arg-type]
        for name, task in (("ranks", "rerank"), ("chat", "generate"), ("new", None), ("dense", "embed"))
    ]
    dispatcher.catalogue.on_model_states(ModelStates(models=models, on_demand=True))
    for absent in (None, ""):
        assert dispatcher.choose(absent).model == "chat"
        assert [dispatcher.find(absent, task).model for task in ("embed", "rerank")] == ["dense", "ranks"]
    dispatcher.catalogue.on_model_states(ModelStates(models=models[:3], on_demand=True))
    assert dispatcher.find(None, "embed").model == "new", "its files are not here yet"
    dispatcher.catalogue.on_model_states(ModelStates(models=models[:2], on_demand=True))
    assert dispatcher.find(None, "embed").model == "ranks", "which says what it is made for"


def test_cache_limits_of_loaded_models_sum_to_the_memory_budget() -> None:
    line = Depot(budget=20, a="running", b="running").line
    limits: list[int | None] = []
    for worker, model, served in (("wa", "a", ["wa"]), ("wb", "b", ["wb", "wa"])):
        line.serving(worker, model, cache_bytes_max=14)
        for found in filter(None, map(line.dispatcher.fleet.get, served)):
            limits.append(line.dispatcher.catalogue.cache_bytes_max(found))
    assert limits == [8, 4, 4], "the first is loaded alone, but the memory of the other is taken"


def test_waiting_requests_are_bounded_and_fail_when_the_model_cannot_be_loaded_or_not_in_time() -> None:
    depot = Depot(waiting_max=2)
    dispatcher = depot.line.dispatcher
    with dispatcher.submit(dispatcher.find("b"), [request("1"), request("2"), request("3")], ()) as flights:
        more = dispatcher.submit(dispatcher.find("b"), [request("4")], ())
        assert refusal(more.__enter__).code is Code.TEXT_GENERATION_BUSY
        depot.line.clock.now += LOAD_S
        dispatcher.sweep()
        assert [flight.terminal for flight in flights] == [None] * 3
        depot.line.clock.now += 0.1
        dispatcher.sweep()
        assert {code_of(flight) for flight in flights} == {Code.MODEL_LOADING}
    with dispatcher.submit(dispatcher.find("a"), [request("x")], ()) as [flight]:
        dispatcher.catalogue.load("a")
        depot.tell(a="failed")
        assert code_of(flight) == Code.MODEL_FAILED
        assert "no such model" in getattr(flight.terminal, "message", "")
    refused = depot.line.refusal("a")
    assert (refused.code, refused.kind.status) == (Code.MODEL_FAILED, 503)
    assert "no such model" in refused.message
    assert refusal(dispatcher.catalogue.load, "a").code is Code.MODEL_FAILED
    dispatcher.check_ready()
    depot.tell(b="failed")
    assert refusal(dispatcher.check_ready).code is Code.MODEL_FAILED
    depot.tell(a="parked")
    assert depot.wanted() == [], "the order to load has ended"


def test_unloading_model_gets_no_requests_and_is_reloaded_on_demand() -> None:
    depot = Depot(budget=10, a="running")
    line, dispatcher = depot.line, depot.line.dispatcher
    depot.line.serving("w", "a", pid=1)
    line.clock.now += 60
    with dispatcher.submit(dispatcher.find("b"), [request("x")], ()):
        assert depot.wanted() == []
        assert isinstance(dispatcher.find("a"), UnloadedModel)
        line.clock.now += 1
        with dispatcher.submit(dispatcher.find("a"), [request("y")], ()):
            assert line.attempts_sent_to("w") == []
            line.dispatcher.lost("w")
            depot.tell(a="parked")
            assert depot.wanted() == ["b"]


def test_leaving_worker_is_idle_after_its_last_request() -> None:
    line, workers = Line(), [ReadyWorker(1, "m", "")]
    line.serving("w1")
    flight = line.submit(request("x"))
    line.dispatcher.catalogue.on_model_states(
        ModelStates(models=[ModelState(name="m", stage="running", leaving=[1])])
    )
    assert line.told[-1] == DesiredModels(serving=[1], workers=workers)
    line.refusal()
    line.say("w1", accepted("w1", "x"), finished("w1", "x"))
    line.contexts.pop().__exit__(None, None, None)
    assert flight.terminal is not None
    assert line.told[-1] == DesiredModels(serving=[1], workers=workers, idle=[1])


def test_a_worker_of_another_machine_is_not_taken_for_a_process_of_the_supervisors() -> None:
    line = Line(host="here")
    line.serving("local", "m", host="here", pid=7)
    line.serving("remote", "m", host="there", pid=8)
    line.serving("older", "m", pid=9)
    line.serving("far", "b", host="there")
    catalogue, local, remote = line.dispatcher.catalogue, *map(line.dispatcher.fleet.get, ("local", "remote"))
    assert local is not None
    assert remote is not None
    for leaving in (8, 7):
        states = [ModelState(name="m", stage="running", leaving=[leaving]), ModelState(name="b")]
        catalogue.on_model_states(ModelStates(models=states, on_demand=True))
        assert line.told[-1].serving == [7, 9]
        assert line.told[-1].idle == [leaving], "no local worker has this pid, or it is idle"
        assert local.serves == (leaving != 7)
        assert remote.serves
    # It serves a model that is not loaded here.
    found = line.dispatcher.find("b")
    assert isinstance(found, Worker)
    with line.dispatcher.submit(found, [request("x")], ()):
        assert line.told[-1].wanted == ["m"]
    line.dispatcher.lost("far")
    assert isinstance(line.dispatcher.find("b"), UnloadedModel)


# --- orders of an operator ---


def test_a_model_is_loaded_without_a_request_when_an_operator_orders_it() -> None:
    depot = Depot(a="failed")
    catalogue = depot.line.dispatcher.catalogue
    assert (catalogue.state("a"), catalogue.state("b")) == ("failed", "unloaded")
    assert catalogue.load("alias") == "b"
    assert depot.wanted() == ["b"]
    depot.tell(b="running")
    assert catalogue.state("b") == "loading"
    depot.line.serving("w", "b", pid=7)
    assert catalogue.state("b") == "loaded"
    assert catalogue.load("b") == "b"  # which changes nothing
    assert catalogue.unload("b") == "b"
    assert depot.wanted() == []
    depot.line.hello("v", "stranger")
    assert catalogue.state("stranger") == "loading"
    depot.line.dispatcher.lost("v")
    assert catalogue.state("stranger") == "unloaded"
    catalogue.on_model_states(ModelStates(models=[ModelState(name="a", resident=True)], on_demand=True))
    for model, code in (("a", Code.INVALID_REQUEST), ("c", Code.MODEL_NOT_FOUND)):
        error = refusal(catalogue.unload, model)
        assert (error.code, error.param) == (code, "model")


def test_an_order_to_load_makes_room_and_ends_when_its_time_is_over() -> None:
    depot = Depot(budget=10, a="running")
    line, catalogue = depot.line, depot.line.dispatcher.catalogue
    depot.line.serving("w", "a", pid=7)
    with line.dispatcher.submit(line.dispatcher.find("a"), [request("x")], ()):
        catalogue.load("b")
        assert depot.wanted() == ["a"], "a is in use"
        line.clock.now += LOAD_ORDER_S_MAX
        catalogue.update()
    assert depot.wanted() == ["a"], "the order has ended"
    line.clock.now += 60
    catalogue.load("b")
    depot.tell(a="parked")
    line.dispatcher.lost("w")
    assert depot.wanted() == ["b"]
