"""`view.js`: the overview of a status document."""

from __future__ import annotations

from typing import Any

from tests.broker.application import House
from tests.broker.page import status
from tests.broker.page.scripts import Call
from tests.broker.page.status import NOW, document, event, model, request, worker


def seen(call: Call, **told: Any) -> Any:
    return call("view.js", "view", document(**told))


LOST = [event("connection lost", NOW - 1.5), event("ready", NOW - 60), event("connected", NOW - 61)]


def test_one_line_says_whether_all_is_well(call: Call) -> None:
    lost = {"workers": [], "events": LOST, "models": [model(waiting=1)]}
    for told, tone, words in (
        ({}, "good", "Serving 1 model, no active requests"),
        ({"workers": [], "models": []}, "idle", "No worker is connected"),
        ({"workers": [worker(state="loading")]}, "busy", "Loading a model"),
        ({"workers": [], "models": [model(state="failed")]}, "bad", "Cannot load org/model"),
        (lost, "bad", "Lost the worker of org/model; 1 request waits for the next one"),
    ):
        assert seen(call, **told)["verdict"] == {"tone": tone, "text": words}


def test_the_head_says_what_waits_in_the_background_and_that_the_journal_fails(call: Call) -> None:
    told = document() | {"durable": {"queued": 2, "journal": {"problem": "disk full"}}}
    told["gateway"]["stopping"] = True
    shown = call("view.js", "view", told)
    said = " · 2 responses queued in the background · the journal cannot be written"
    assert shown["about"].endswith(said)
    assert shown["verdict"]["text"] == "The gateway is shutting down"


def test_a_model_whose_worker_died_says_when_how_and_who_waits(call: Call) -> None:
    [card] = seen(call, workers=[], events=LOST, models=[model(state="unloaded", waiting=2)])["models"]
    assert (card["tone"], card["state"]) == ("bad", "worker lost, 1.5 s ago")
    assert card["trouble"] == "connection lost · 2 requests wait for the next worker"
    assert card["workers"] == []


def test_a_model_on_demand_can_be_loaded_unloaded_and_pinned(call: Call) -> None:
    for told, buttons in (
        ({"state": "unloaded"}, {"Load"}),
        ({"state": "loaded"}, {"Unload", "Pin"}),
        ({"state": "loaded", "pinned": True}, {"Unpin"}),
    ):
        [card] = seen(call, models=[model(**told, on_demand=True)])["models"]
        assert {verb for verb in ("Load", "Unload", "Pin", "Unpin") if card[f"can{verb}"]} == buttons


def test_a_model_says_what_is_on_disk_and_whether_it_fits(call: Call) -> None:
    for size, detail, trouble in (
        (None, "not on this machine yet", ""),
        (2**32, "4 GiB on disk", "It is larger than the memory budget of 2 GiB."),
    ):
        of = model(state="unloaded", on_demand=True, weight_bytes=size)
        [card] = seen(call, workers=[], models=[of], memory_budget=2**31)["models"]
        assert (card["detail"], card["trouble"], card["canLoad"]) == (detail, trouble, not trouble)


def test_a_model_says_why_it_failed_and_how_its_last_worker_ended(call: Call) -> None:
    failed = model(state="failed", failure="It is not on this machine.")
    [card] = seen(call, workers=[], models=[failed])["models"]
    assert card["trouble"] == failed["failure"]
    of = model(restarts=2, last_end="a sentence", last_end_reason="sigkill", answered_tokens=1234)
    [card] = seen(call, models=[of])["models"]
    assert card["detail"] == "2 restarts, last: SIGKILL · 1,234 tokens generated"


def test_a_worker_tells_what_it_holds(call: Call) -> None:
    prefix = {"ram_bytes": 2**29, "ram_limit": 2**30, "disk_bytes": 0, "disk_limit": 0}
    prefix |= {"lookups": 10, "token_hit_rate": 0.875}
    memory = {"resident_bytes": 2**30, "footprint_bytes": 3 * 2**30, "device_bytes": 2**30}
    of = worker(running=3, waiting=1, prefix=prefix, memory=memory, cache_bytes=2**20, cache_bytes_max=2**22)
    of["images"] = {"bytes": 3, "bytes_max": 12}
    [line] = seen(call, workers=[of])["models"][0]["workers"]
    assert line["line"] == "ready · pid 7 · up 1 min 1 s · context 8,192"
    assert (line["rows"], line["occupancy"]) == ("3 of 4, 1 waiting", 0.75)
    assert (line["cache"], line["cacheShare"]) == ("1 MiB of 4 MiB", 0.25)
    assert (line["ram"], line["ramShare"], line["disk"]) == ("512 MiB of 1 GiB", 0.5, "")
    assert (line["images"], line["imagesShare"]) == ("3 B of 12 B", 0.25)
    assert line["memory"] == "process 3 GiB, device 1 GiB · 88% of prompt tokens from cache"
    loading = worker(state="loading", loading={"done": 2**20, "total": 2**22}, running_max=None)
    [card] = seen(call, workers=[loading], models=[model(state="loading", waiting=2)])["models"]
    assert card["wait"] == "2 requests wait · loading the model, 25%"
    assert card["workers"][0]["loadedText"] == "1 MiB of 4 MiB"
    adapters = [{"name": "sql", "leaving": False}, {"name": "old", "leaving": True}]
    assert "adapters sql, old (leaving)" in str(seen(call, models=[model(adapters=adapters)])["models"])


def test_an_awaited_answer_says_what_becomes_of_it(call: Call) -> None:
    paused = request("chatcmpl-3", phase="queued", phases=[["queued", 0], ["decode", 1], ["paused", 2]])
    told = document(requests=[request("chatcmpl-2"), request("chatcmpl-1"), paused])
    words = "the worker was lost; the next one continues this"
    assert call("view.js", "stateOf", told, "chatcmpl-1", "org/model") == "decode · 12 tokens · 41/s"
    assert call("view.js", "stateOf", told, "chatcmpl-3", "org/model") == words
    assert call("view.js", "stateOf", told, "", "org/model") == "sent"
    assert call("view.js", "stateOf", told, "chatcmpl-9", "org/model") == ""
    gone = document(workers=[], events=LOST)
    assert call("view.js", "stateOf", gone, "", "org/model").startswith("the worker was lost")


async def test_a_document_of_the_server_itself_can_be_shown(call: Call, house: House) -> None:
    told: dict[str, Any] = (await house.get("/v1/status").end()).json
    assert set(status.document()) <= set(told)
    shown = call("view.js", "view", told)
    assert shown["verdict"]["tone"] == "good"
    assert [card["name"] for card in shown["models"]] == ["org/model"]
    for kind, made in (("models", model()), ("workers", worker())):
        assert set(made) <= set(told[kind][0])


def test_batches_show_their_progress_and_what_they_wait_for(call: Call) -> None:
    batch = {"id": "batch_1", "status": "in_progress", "endpoint": "/v1/embeddings", "total": 1200}
    done = {"succeeded": 1000, "errored": 1, "created_at": NOW}
    told = document() | {"batches": {"unfinished": [batch | done], "problem": "the disk is full"}}
    first, second = call("view.js", "view", told)["batches"]
    assert (first["what"], first["more"]) == ("batches wait", "the disk is full")
    assert second["what"] == "batch_1 in progress"
    assert second["more"] == "1,001 of 1,200 requests · 1 failed · /v1/embeddings"
