"""`view.js`: the overview of a status document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.application import House
from tests.broker.asgi import run
from tests.broker.page import status
from tests.broker.page.scripts import Call
from tests.broker.page.status import NOW, document, end, event, model, refusal, request, worker


def seen(call: Call, **told: Any) -> Any:
    return call("view.js", "view", document(**told))


LOST = [event("connection lost", NOW - 1.5), event("ready", NOW - 60), event("connected", NOW - 61)]


@pytest.mark.parametrize(
    ("told", "tone", "words"),
    [
        ({}, "good", "Serving 1 model, no requests in flight"),
        ({"requests": [request()]}, "good", "Serving 1 model, 1 request in flight"),
        ({"workers": [], "models": []}, "idle", "No worker is connected"),
        ({"workers": [worker(state="loading")]}, "busy", "Loading a model"),
        ({"workers": [], "models": [model(state="failed")]}, "bad", "Cannot load org/model"),
        ({"workers": [], "events": LOST}, "bad", "Lost the worker of org/model"),
        (
            {"workers": [], "events": LOST, "models": [model(waiting=1)]},
            "bad",
            "Lost the worker of org/model; 1 request waits for the next one",
        ),
    ],
)
def test_one_line_says_whether_all_is_well(call: Call, told: Any, tone: str, words: str) -> None:
    assert seen(call, **told)["verdict"] == {"tone": tone, "text": words}


def test_a_gateway_that_stops_says_so_before_anything_else(call: Call) -> None:
    stopping = document(workers=[], events=LOST)
    stopping["gateway"]["stopping"] = True
    assert call("view.js", "view", stopping)["verdict"]["text"] == "The gateway is shutting down"


def test_a_model_whose_worker_died_says_when_how_and_who_waits(call: Call) -> None:
    [card] = seen(call, workers=[], events=LOST, models=[model(state="unloaded", waiting=2)])["models"]
    assert (card["tone"], card["state"]) == ("bad", "worker lost, 1.5 s ago")
    assert card["trouble"] == "connection lost · 2 requests wait for the next worker"
    assert card["workers"] == []


def test_a_model_with_another_worker_has_lost_nothing(call: Call) -> None:
    [card] = seen(call, events=LOST)["models"]
    assert (card["tone"], card["state"], card["trouble"]) == ("good", "loaded", "")


def test_a_worker_that_was_told_to_go_and_came_back_is_in_no_pause(call: Call) -> None:
    back = [event("ready", NOW - 1, incarnation="w2"), event("said goodbye: told to", NOW - 4), *LOST[1:]]
    told = seen(call, events=back)
    assert told["verdict"]["tone"] == "good"
    assert [line["tone"] for line in told["events"]] == ["good", "idle", "good", "busy"]
    assert told["events"][0]["more"] == "after 3.0 s"


@pytest.mark.parametrize(
    ("reason", "told"), [("sigkill", "SIGKILL"), ("exit_70", "exit 70"), ("not_started", "not started")]
)
def test_restarts_are_told_with_how_the_last_one_ended(call: Call, reason: str, told: str) -> None:
    of = model(restarts=2, last_end="a sentence", last_end_reason=reason, answered_tokens=1234)
    [card] = seen(call, models=[of])["models"]
    assert card["detail"] == f"2 restarts, last: {told} · 1,234 tokens generated"


def test_a_worker_tells_what_it_holds(call: Call) -> None:
    prefix = {"ram_bytes": 2**29, "ram_limit": 2**30, "disk_bytes": 0, "disk_limit": 0}
    prefix |= {"lookups": 10, "token_hit_rate": 0.875}
    memory = {"resident_bytes": 3 * 2**30, "device_bytes": 2**30}
    of = worker(running=3, waiting=1, prefix=prefix, memory=memory, cache_bytes=2**20, cache_bytes_max=2**22)
    of["images"] = {"bytes": 3, "bytes_max": 12}
    [line] = seen(call, workers=[of])["models"][0]["workers"]
    assert line["line"] == "ready · pid 7 · up 1 min 1 s · context 8,192"
    assert (line["rows"], line["occupancy"]) == ("3 of 4, 1 waiting", 0.75)
    assert (line["cache"], line["cacheShare"]) == ("1 MiB of 4 MiB", 0.25)
    assert (line["ram"], line["ramShare"], line["disk"]) == ("512 MiB of 1 GiB", 0.5, "")
    assert (line["images"], line["imagesShare"]) == ("3 B of 12 B", 0.25)
    assert line["memory"] == "process 3 GiB, device 1 GiB · 88% of prompt tokens from cache"
    assert not line["loading"]


def test_a_worker_that_loads_says_how_far_it_is(call: Call) -> None:
    of = worker(state="loading", loading={"done": 2**20, "total": 2**22}, running_max=None)
    [line] = seen(call, workers=[of], models=[model(state="loading")])["models"][0]["workers"]
    assert (line["loading"], line["loaded"], line["loadedText"]) == (True, 0.25, "1 MiB of 4 MiB")
    assert not line["occupied"]


@pytest.mark.parametrize(
    ("told", "phase", "tone"),
    [
        ({"phase": "queued"}, "waiting for a worker", "bad"),
        ({"phase": "waiting"}, "waiting", "busy"),
        ({"phase": "decode"}, "decode", "good"),
        ({"phase": "unheard of"}, "unheard of", "idle"),
    ],
)
def test_a_request_says_where_it_stands(call: Call, told: Any, phase: str, tone: str) -> None:
    line = call("view.js", "requestLine", request(**told))
    assert (line["phase"], line["tone"], line["reading"]) == (phase, tone, False)


def test_a_request_that_reads_its_prompt_says_how_far_it_is(call: Call) -> None:
    early = request(phase="prefill", prefilled=25, answered=0, time_to_first_token_s=None, tokens_per_s=None)
    line = call("view.js", "requestLine", early)
    assert (line["share"], line["tokens"], line["reading"]) == (0.25, "prompt 25 of 100", True)
    assert (line["speed"], line["first"]) == ("", "")


def test_request_line_notes_cache_hits_resumes_and_preemptions(call: Call) -> None:
    of = request(resumes=1, preemptions=2, reuse={"tokens": 96, "tier": "ram"})
    notes = "96 of 100 prompt tokens from ram · resumed once · preempted 2 times"
    assert call("view.js", "requestLine", of)["notes"] == notes


def test_failure_is_listed_once(call: Call) -> None:
    told = seen(
        call,
        failures=[end("engine_error", time=NOW - 10)],
        refusals=[
            refusal(404, "model_not_found", time=NOW),
            refusal(500, "engine_error", time=NOW - 9.95),
            refusal(500, "engine_error", time=NOW - 30),
        ],
    )["errors"]
    words = ["404 model_not_found", "engine_error · org/model", "500 engine_error"]
    assert [line["what"] for line in told] == words
    assert [line["tone"] for line in told] == ["busy", "bad", "bad"]


def test_lines_have_keys_of_their_own_that_stay(call: Call) -> None:
    twice = [end(), end()]
    before = [line["key"] for line in seen(call, ends=twice)["ends"]]
    after = [line["key"] for line in seen(call, ends=[end(), *twice])["ends"]]
    assert len(set(after)) == 3
    assert after[1:] == before


def test_an_end_says_what_was_asked_where_that_was_no_answer(call: Call) -> None:
    told = seen(call, ends=[end(), end(task="embed")])["ends"]
    assert [line["what"] for line in told] == ["org/model · stop", "org/model · embed · stop"]


@pytest.mark.parametrize(
    ("code", "tone"), [("stop", "good"), ("client_left", "idle"), ("worker_crashed", "bad")]
)
def test_an_end_is_good_or_not(call: Call, code: str, tone: str) -> None:
    [line] = seen(call, ends=[end(code, cached_tokens=50, resumes=1)])["ends"]
    assert line["tone"] == tone
    assert line["more"] == "12 tokens · 2.0 s · 50% cached · 1 resume"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("decode", "decode · 12 tokens · 41/s"),
        ("queued", "the worker was lost; the next one continues this"),
    ],
)
def test_an_awaited_answer_says_what_becomes_of_it(call: Call, phase: str, words: str) -> None:
    told = document(requests=[request("chatcmpl-2"), request("chatcmpl-1", phase=phase)])
    assert call("view.js", "stateOf", told, "chatcmpl-1", "org/model") == words
    assert call("view.js", "stateOf", told, "", "org/model") == "sent"
    assert call("view.js", "stateOf", told, "chatcmpl-9", "org/model") == ""
    assert call("view.js", "stateOf", None, "", "") == "sent"
    gone = document(workers=[], events=LOST)
    assert call("view.js", "stateOf", gone, "", "org/model").startswith("the worker was lost")


def test_a_document_of_the_server_itself_can_be_shown(call: Call, house: House) -> None:
    told: dict[str, Any] = {}

    async def talk() -> None:
        told.update((await house.get("/v1/status").end()).json)

    run(talk())
    assert set(status.document()) <= set(told)
    shown = call("view.js", "view", told)
    assert shown["verdict"]["tone"] == "good"
    assert [card["name"] for card in shown["models"]] == ["org/model"]
    for kind, made in (("models", model()), ("workers", worker())):
        assert set(made) <= set(told[kind][0])
