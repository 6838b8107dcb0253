"""Workers that outlived a gateway: requests at the next one wait for them, for a short time."""

from __future__ import annotations

import pytest

from broker.dispatch.catalogue import CONNECT_S_MAX
from protocol.errors import Code, RequestError
from protocol.supervisor_messages import ModelState, ModelStates
from tests.broker.dispatcher_line import Line, code_of, ready
from tests.factories import request


def restarted(*, by_supervisor: bool = False, loaded: bool = True) -> Line:
    """Return a gateway that has just started, with a worker of the model `m` from before."""
    line = Line()
    if by_supervisor:
        states = ModelStates(models=[ModelState(name="m", stage="running", loaded=loaded)])
        line.dispatcher.catalogue.on_model_states(states)
    else:
        line.dispatcher.catalogue.expect(ready("earlier", "m"))
    return line


@pytest.mark.parametrize("model", ["m", None])
@pytest.mark.parametrize("by_supervisor", [True, False])
def test_a_request_waits_for_a_worker_that_has_not_connected_yet(
    model: str | None, by_supervisor: bool
) -> None:
    line = restarted(by_supervisor=by_supervisor)
    flight = line.submit(request("a"), model=model)
    line.serving("w")
    assert line.attempts_sent_to("w") == [flight.id]
    assert line.attempts_sent_to("w") == []
    line.clock.now += CONNECT_S_MAX
    line.dispatcher.sweep()
    assert flight.terminal is None


def test_it_is_refused_if_the_worker_does_not_connect_in_time() -> None:
    line, served = restarted(), []
    line.dispatcher.on_served = lambda model, ready: served.append((model, ready))
    flight = line.submit(request("a"))
    line.clock.now += CONNECT_S_MAX - 0.1
    line.dispatcher.sweep()
    assert (code_of(flight), served) == (None, [])
    line.clock.now += 0.1
    line.dispatcher.sweep()
    assert (code_of(flight), served) == (Code.WORKER_UNAVAILABLE, [("m", None)])
    assert list(line.dispatcher.fleet.models) == []
    assert "No worker serves" in line.refusal().message


def test_it_is_refused_as_soon_as_the_worker_turns_out_to_load_its_model() -> None:
    line = restarted()
    flight = line.submit(request("a"))
    line.hello("w")
    line.dispatcher.sweep()
    assert code_of(flight) == Code.MODEL_LOADING


def test_only_models_that_something_has_loaded_are_waited_for() -> None:
    line = restarted(by_supervisor=True, loaded=False)
    line.dispatcher.catalogue.expect(ready("earlier", "m"))  # the supervisor knows better
    for model in ("m", "another"):
        assert "No worker serves" in line.refusal(model).message


def test_a_gateway_without_a_worker_is_not_ready_whatever_it_expects() -> None:
    with pytest.raises(RequestError, match="No worker serves"):
        restarted().dispatcher.check_ready()
