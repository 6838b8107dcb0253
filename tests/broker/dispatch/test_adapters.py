"""Adapters at the gateway: who has which, who gets which, and which requests may use them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.dispatch.flight import Flight
from protocol.messages import AdaptersChanged, Failed, Generate, LoadAdapter, UnloadAdapter
from protocol.types import AdapterInfo
from tests.broker.dispatcher_line import Line, code_of, refusal
from tests.factories import events, finished, request

FIRST = AdapterInfo(name="first", digest="d1", rank=4, folder="/a/first")
SECOND = AdapterInfo(name="second", digest="d2", rank=8, folder="/a/second")


def changed(line: Line, worker: str, name: str, *adapters: AdapterInfo, error: str = "") -> None:
    line.say(worker, AdaptersChanged(incarnation=worker, name=name, error=error, adapters=list(adapters)))


def orders(line: Line, worker: str) -> list[tuple[str, str]]:
    """Return the orders sent to a worker since the last call."""
    messages = line.sent_to(worker)
    return [(type(m).__name__, m.name) for m in messages if isinstance(m, LoadAdapter | UnloadAdapter)]


def asked(line: Line, id: str, adapter: str = "first") -> Flight:
    return line.submit(request(id, adapter=adapter))


def test_names_of_adapters_are_read_from_the_model() -> None:
    line = Line()
    line.serving("w", adapters=[FIRST])
    line.serving("x", "llama:8b")
    found, name = line.dispatcher.choose("m:first", None)
    assert (found.model, name) == ("m", "first")
    assert line.dispatcher.choose("llama:8b").adapter == ""
    assert line.dispatcher.choose("m", "first").adapter == "first"
    for model, adapter, code in (
        ("m:none", None, "adapter_not_found"),
        ("m", "none", "adapter_not_found"),
        ("m:first", "second", "invalid_request"),
        ("none:first", None, "model_not_found"),
    ):
        assert refusal(line.dispatcher.choose, model, adapter).code == code


def test_a_request_goes_to_a_worker_that_has_its_adapter() -> None:
    line = Line()
    line.serving("w")
    line.serving("x", adapters=[FIRST])
    assert orders(line, "x") == []
    asked(line, "a")
    assert line.attempts_sent_to("x") == ["a"]
    line.submit(request("b"))
    assert line.attempts_sent_to("w") == ["b"]


@pytest.mark.parametrize("successor", ["loads it", "cannot load it", "stands in"])
def test_a_successor_gets_the_adapters_and_then_the_requests(successor: str) -> None:
    line = Line()
    line.serving("w", adapters=[FIRST])
    flight = asked(line, "a")
    line.say("w", events("w", "a", "one"))
    line.dispatcher.lost("w")
    line.serving("x", stands_in=successor == "stands in")
    messages = line.sent_to("x")
    assert not any(isinstance(m, Generate) for m in messages)
    folders = [m.folder for m in messages if isinstance(m, LoadAdapter)]
    assert folders == ([] if successor == "stands in" else ["/a/first"])
    if successor == "loads it":
        changed(line, "x", "first", FIRST)
        assert line.attempts_sent_to("x") == ["a~2"]
        assert flight.terminal is None
        return
    if successor == "cannot load it":
        assert flight.terminal is None
        changed(line, "x", "first", error="its folder is gone")
    assert code_of(flight) == "adapter_not_found"


def test_an_answer_is_not_continued_with_other_weights_of_the_adapter() -> None:
    line = Line()
    line.serving("w", adapters=[FIRST])
    begun, waiting = asked(line, "a"), asked(line, "b")
    line.say("w", events("w", "a", "one"))
    line.dispatcher.lost("w")
    line.serving("x", adapters=[replace(FIRST, digest="other")])
    assert line.attempts_sent_to("x") == ["b~2"]
    assert isinstance(begun.terminal, Failed)
    assert waiting.terminal is None


def test_a_removed_adapter_is_unloaded_behind_its_last_request() -> None:
    line = Line()
    line.serving("w", adapters=[FIRST, SECOND])
    line.serving("x", adapters=[FIRST, SECOND])
    asked(line, "a")
    assert line.dispatcher.adapters.remove("m", "first") == 1
    assert refusal(line.dispatcher.choose, "m:first", None).code == "adapter_not_found"
    assert "in use" in refusal(line.dispatcher.adapters.load("m", "first", "/b").__enter__).message
    assert orders(line, "x") == []
    line.dispatcher.lost("x")  # the request was there or on the other worker: it goes on with the adapter
    line.serving("y")
    assert ("LoadAdapter", "first") in orders(line, "y")
    changed(line, "y", "first", SECOND, FIRST)
    [worker] = {f.attempt.worker for f in line.dispatcher.flights if f.attempt}
    [attempt] = {f.attempt.id for f in line.dispatcher.flights if f.attempt}
    line.say(worker, events(worker, attempt, "one"), finished(worker, attempt))
    line.dispatcher.sweep()
    assert ("UnloadAdapter", "first") in orders(line, "w")
    assert ("UnloadAdapter", "first") in orders(line, "y")
    assert [info.name for info in line.dispatcher.adapters.known("m")] == ["second"]
    line.serving("z", adapters=[FIRST, SECOND])
    assert orders(line, "z") == [("UnloadAdapter", "first")]


def test_an_adapter_is_served_once_all_workers_have_it() -> None:
    line = Line()
    line.serving("w")
    line.serving("x")
    with line.dispatcher.adapters.load("m", "first", "/a/first") as order:
        changed(line, "w", "first", FIRST)
        changed(line, "x", "first", error="it has no weights")
        assert order.error == "it has no weights"
    assert orders(line, "w") == [("LoadAdapter", "first"), ("UnloadAdapter", "first")]
    changed(line, "w", "first")
    assert line.dispatcher.adapters.known("m") == []
    over = []
    with line.dispatcher.adapters.load("m", "first", "/a/first") as order:
        order.on_over = lambda: over.append(True)
        changed(line, "w", "first", FIRST)
        assert not over
        changed(line, "x", "first", FIRST)
        assert over
        assert order.info == FIRST
        line.serving("late")
    assert orders(line, "late") == [("LoadAdapter", "first")]
    with line.dispatcher.adapters.load("m", "second", "/a/second") as order:
        for worker in ("w", "x", "late"):
            assert not order.is_over
            line.dispatcher.lost(worker)
        assert order.error
    assert line.dispatcher.adapters.known("m") == [FIRST]
    assert "exists" in refusal(line.dispatcher.adapters.load("m", "first", "/a").__enter__).message


def test_a_name_can_be_used_again_after_its_removal() -> None:
    """The reply to the order to unload it is not taken for that to the order to load it."""
    line = Line()
    line.serving("w", adapters=[FIRST])
    assert line.dispatcher.adapters.remove("m", "first") == 0
    with line.dispatcher.adapters.load("m", "first", "/a/other") as order:
        changed(line, "w", "first")
        assert not order.is_over
        other = replace(FIRST, digest="other", folder="/a/other")
        changed(line, "w", "first", other)
        assert order.is_over
    assert line.dispatcher.adapters.known("m") == [other]
    assert orders(line, "w") == [("UnloadAdapter", "first"), ("LoadAdapter", "first")]
