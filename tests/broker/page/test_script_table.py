"""`table.js`: rows of the table of requests, filters, and the waterfall of a request."""

from __future__ import annotations

from typing import Any

from tests.broker.page.scripts import Call
from tests.broker.page.status import NOW, document, end, event, model, refusal, request, worker


def rows(call: Call, **told: Any) -> Any:
    return call("table.js", "rows", document(**told))


def row(call: Call, **told: Any) -> Any:
    [found] = rows(call, **told)
    return found


def test_requests_of_all_kinds_are_one_list_the_newest_first(call: Call) -> None:
    told = rows(
        call,
        requests=[request("running", time=NOW - 3)],
        ends=[end(id="ended", time=NOW, seconds=5.0)],
        refusals=[refusal(404, "model_not_found", request_id="refused", time=NOW - 1)],
    )
    assert [each["id"] for each in told] == ["refused", "running", "ended"]
    assert [each["group"] for each in told] == ["failed", "active", "finished"]
    assert [each["active"] for each in told] == [False, True, False]
    assert len({each["key"] for each in told}) == 3


def test_a_row_of_a_running_request_has_every_figure(call: Call) -> None:
    found = row(
        call,
        requests=[request(key="ann", reuse={"tokens": 96, "tier": "ram"}, resumes=1, preemptions=2)],
        captured=["chatcmpl-1"],
    )
    assert found["captured"]
    assert (found["owner"], found["model"], found["status"]) == ("ann", "org/model", "decode")
    assert (found["first"], found["tokens"], found["speed"]) == ("250 ms", "100 → 12", "41")
    assert (found["cached"], found["duration"], found["tone"]) == ("96%", "2.0 s", "good")
    assert found["facts"] == [
        "100 prompt tokens, 96 from ram", "resumed once", "preempted 2 times", "first token after 250 ms",
    ]  # fmt: skip


def test_a_row_of_an_ended_request_has_every_figure(call: Call) -> None:
    found = row(call, ends=[end(key="bob", answered=71, cached_tokens=50)])
    assert row(call, ends=[end(task="embed", time_to_first_token_s=None)])["status"] == "embed · stop"
    cancelled = row(call, ends=[end("request_cancelled")])
    assert (cancelled["tone"], cancelled["group"]) == ("idle", "failed")
    assert (found["owner"], found["status"], found["tone"]) == ("bob", "stop", "idle")
    assert (found["first"], found["tokens"], found["speed"]) == ("250 ms", "100 → 71", "40")
    assert (found["cached"], found["duration"], found["time"]) == ("50%", "2.0 s", NOW - 2)


def test_a_failure_is_listed_once(call: Call) -> None:
    failed = end("engine_error", time=NOW - 10)
    told = rows(
        call,
        ends=[failed],
        failures=[failed, end("engine_error", id="older", time=NOW - 20)],
        refusals=[
            refusal(404, "model_not_found", time=NOW),
            refusal(500, "engine_error", time=NOW - 9.95),
            refusal(500, "engine_error", time=NOW - 30),
        ],
    )
    words = ["404 model not found", "engine error", "engine error", "500 engine error"]
    assert [each["status"] for each in told] == words
    assert [each["tone"] for each in told] == ["busy", "bad", "bad", "bad"]
    assert told[0]["path"] == "POST /v1/chat/completions"


def test_refusals_of_a_client_that_retries_are_one_row(call: Call) -> None:
    loading = [refusal(503, "model_loading", request_id=f"req_{n}", time=NOW - n) for n in range(3)]
    other = refusal(503, "shutting_down", time=NOW - 9)
    told = rows(call, refusals=[*loading, other], ends=[end(id="ended", time=NOW, seconds=20.0)])
    assert [each["status"] for each in told] == ["503 model loading × 3", "503 shutting down", "stop"]
    assert (told[0]["tone"], told[0]["time"], told[0]["facts"][0][:13]) == ("busy", NOW, "3 times since")
    before = rows(call, refusals=[*loading[1:], other])
    assert before[0]["key"] == told[0]["key"]


def test_a_filter_leaves_what_it_names(call: Call) -> None:
    told = rows(
        call,
        requests=[request("a", key="ann")],
        ends=[end(id="b", model="small", time=NOW - 1), end("engine_error", id="c", time=NOW - 2)],
    )
    every = {"group": "", "model": "", "text": ""}
    for filter, left in (
        ({}, "abc"),
        ({"group": "failed"}, "c"),
        ({"model": "small"}, "b"),
        ({"text": "ANN  org"}, "a"),
    ):
        found = call("table.js", "filtered", told, every | filter)
        assert sorted(each["id"] for each in found) == [*left]


# --- phases ---


LOADING = {
    "workers": [worker(state="loading", running_max=None, loading={"done": 1, "total": 4})],
    "models": [model(state="loading")],
}
LOST = event("connection lost", NOW - 1)


def test_a_request_says_what_it_waits_for(call: Call) -> None:
    for told, words, tone in (
        ({"workers": [], "models": [model(state="unloaded")]}, "waiting for memory for the model", "busy"),
        (LOADING, "loading the model, 25%", "busy"),
        ({"workers": [], "events": [LOST]}, "waiting for the next worker", "bad"),
    ):
        found = row(call, requests=[request(phase="queued", phases=[["queued", 0.0]])], **told)
        assert (found["status"], found["tone"]) == (words, tone)
    running = row(call, requests=[request(phase="prefill", prefilled=25)])
    assert (running["status"], running["tone"]) == ("prefill 25%", "busy")


def test_the_waterfall_has_a_bar_for_each_phase_that_took_time(call: Call) -> None:
    starts = {"queued": 0, "preparing": 0.0001, "waiting": 0.5, "prefill": 1, "decode": 2, "paused": 3}
    phases = [*starts.items(), ("decode", 4)]
    bars = call("table.js", "waterfall", {"phases": phases, "seconds": 5.0})
    assert [bar["phase"] for bar in bars] == ["preparing", "waiting", "prefill", "decode", "paused", "decode"]
    assert [round(bar["from"], 3) for bar in bars] == [0.0, 0.1, 0.2, 0.4, 0.6, 0.8]
    assert [round(bar["width"], 3) for bar in bars] == [0.1, 0.1, 0.2, 0.2, 0.2, 0.2]
    assert [bar["took"] for bar in bars][:3] == ["500 ms", "500 ms", "1.0 s"]
    assert bars[4]["label"] == "Pause between workers"
    assert call("table.js", "waterfall", {"phases": [], "seconds": 0}) == []
