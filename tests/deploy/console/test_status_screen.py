"""Status screen."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from broker.api.admin import report
from broker.api.admin.report import StatusSnapshot
from broker.dispatch.traffic import HttpCounters
from deploy.console import status_screen
from protocol.messages import Heartbeat, Loading
from protocol.supervisor_messages import ModelState, ModelStates
from protocol.types import MemoryPressure, PrefixStatus, RequestStatus, Resources
from tests.broker.dispatcher_line import SILENT_S, Line
from tests.factories import accepted, events, finished, request, reused


def status(line: Line) -> dict[str, Any]:
    moment = StatusSnapshot(line.clock.now, line.clock.now)
    told = report.status(line.dispatcher, HttpCounters(), {}, moment, line.clock.now - 3700.0)
    return told | {"history": report.history(line.dispatcher.history.since(0), moment)}


def shown(document: dict[str, Any], width: int = 160) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(status_screen.screen(document))
    return capture.get()


def busy() -> Line:
    """Return a dispatcher with two models, one of which has restarted."""
    line = Line()
    line.dispatcher.sweep()
    states = [ModelState(name="m", restarts=2, last_end_reason="exit_70"), ModelState(name="other[/]")]
    line.dispatcher.catalogue.on_model_states(ModelStates(models=states))
    return line


def test_a_worker_that_loads_says_how_far_it_is() -> None:
    line = busy()
    line.hello("w")
    line.hello("w2", "other[/]")
    line.say("w", Loading(incarnation="w", done=1, total=4))
    text = shown(status(line))
    assert "loading 25%" in text
    assert "2 EXIT 70" in text
    assert "other[/]" in text
    assert "up 1 h 1 m" in text


def test_without_a_supervisor_a_silence_is_no_death_and_a_hung_worker_dies_once() -> None:
    line = Line()
    line.serving("w")
    line.clock.now += SILENT_S + 0.1
    line.dispatcher.sweep()
    line.beat("w")
    line.dispatcher.sweep()
    [row] = [row for row in shown(status(line)).splitlines() if row.startswith("m ")]
    assert row.rstrip().endswith(" 0 B")
    for _ in range(2):
        line.clock.now += SILENT_S + 0.1
        line.dispatcher.sweep()
    line.lose_for_good("w")
    [row] = [row for row in shown(status(line)).splitlines() if row.startswith("m ")]
    assert row.split()[-1] == "1"


def test_writes_to_the_disk_are_shown_with_what_is_left_of_their_budget() -> None:
    line = Line()
    for worker in ("w", "w2"):
        line.serving(worker)
        assert "written to disk" not in shown(status(line))
    for worker in ("w", "w2"):
        line.beat(worker, prefix=PrefixStatus(written_bytes=2**29, writes_limit=2**33, writes_left=2**32))
    assert "1.0 GiB of prefixes written to disk, 4.0 GiB may follow now" in shown(status(line))


def test_requests_are_shown_where_they_stand_and_what_became_of_the_last() -> None:
    line = busy()
    line.serving("w")
    line.submit(request("chat-a"))
    line.submit(request("chat-b"))
    line.submit(request("chat-c"))
    line.say("w", accepted("w", "chat-a"), reused("w", "chat-a", 2, "disk"), events("w", "chat-a", "x"))
    line.clock.now += 0.5
    line.say("w", events("w", "chat-a", "y", first=1), accepted("w", "chat-b"), reused("w", "chat-b"))
    line.say("w", accepted("w", "chat-c"))
    rows = [RequestStatus(id="chat-b", phase="prefill", prompt_tokens=3, prefilled=1, preemptions=2)]
    line.say(
        "w",
        Heartbeat(
            incarnation="w",
            running=2,
            waiting=1,
            steps=3,
            cache_bytes=2_500_000,
            rows=rows,
            resources=Resources(resident_bytes=7_000_000_000, uptime_s=65.0),
            pressure=MemoryPressure(level="warning", relief="refuse_long"),
        ),
        finished("w", "chat-c"),
    )
    line.contexts.pop().__exit__(None, None, None)
    line.clock.now += 1.0
    line.dispatcher.sweep()
    text = shown(status(line))
    [first] = [row for row in text.splitlines() if row.startswith("chat-a")]
    assert "decode" in first
    assert "67% disk" in first
    [second] = [row for row in text.splitlines() if row.startswith("chat-b")]
    assert "1/3" in second
    assert "preempted 2x" in second
    assert "cold" in second
    [third] = [row for row in text.splitlines() if row.startswith("chat-c")]
    assert "stop" in third
    [worker] = [row for row in text.splitlines() if row.startswith("m ")]
    assert " ".join(worker.split()) == "m ready 1 m 5 s 2/4 1 8,192 7.0 GB 2 MB 2 EXIT 70"
    assert "1 tokens/s" in text
    assert "the machine: new long prompts are refused" in text


def test_batches_a_long_queue_and_a_model_that_is_away_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    line = busy()
    monkeypatch.setattr(status_screen, "REQUESTS_SHOWN_MAX", 2)
    line.serving("w")
    for number in range(5):
        line.submit(request(f"chat-{number}"))
    document = status(line)
    batch = {
        "id": "batch_1", "status": "in_progress", "endpoint": "/v1/chat/completions",
        "succeeded": 1200, "errored": 3, "total": 5000,
    }  # fmt: skip
    text = shown(document | {"batches": {"unfinished": [batch], "problem": "the disk is full"}})
    assert "5 in flight" in text
    assert "3 more" in text
    assert "1,203/5,000 3" in " ".join(text.split())
    assert "batches wait: the disk is full" in text
    idle = {"unfinished": [], "problem": ""}
    assert "batches" not in shown(document | {"batches": idle})
    [away] = [row for row in shown(document | {"workers": []}).splitlines() if row.startswith("m ")]
    assert away.split()[:2] == ["m", document["models"][0]["state"]]


def test_a_sparkline_has_gaps_where_nothing_was_measured() -> None:
    bars = status_screen._BARS
    assert status_screen.spark([0.0, None, 4.0, 8.0]) == f"{bars[0]} {bars[4]}{bars[-1]}"
    assert status_screen.spark([None, 0.0]) == f" {bars[0]}"
