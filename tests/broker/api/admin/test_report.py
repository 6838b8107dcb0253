"""Status reports of workers and caches, which contain no text of clients."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from broker.api.admin import report
from broker.api.admin.report import StatusSnapshot
from broker.dispatch.traffic import HttpCounters
from protocol.messages import Heartbeat, Loading
from protocol.supervisor_messages import ModelState, ModelStates
from protocol.types import (
    ExpertStatus,
    ImageStatus,
    MemoryPressure,
    PrefixReuse,
    PrefixStatus,
    PreparationStatus,
    RankMemory,
    RequestStatus,
    Resources,
    SpecDecodeStats,
    SpecDecodeStatus,
)
from tests.broker.dispatcher_line import SILENT_S, STALL_S, Line
from tests.factories import finished, request

DECODING = RequestStatus(
    id="a", phase="decode", prompt_tokens=100, prefilled=100, answered=21, seconds=3.0, first_token_s=1.0,
    reuse=PrefixReuse(tokens=96, tier="disk", miss="diverged"), preemptions=3,
)  # fmt: skip
WAITING = RequestStatus(id="b", phase="waiting", prompt_tokens=7, seconds=0.5)


def prefix(**fields: Any) -> PrefixStatus:
    whole = {
        "ram_bytes": 10, "ram_limit": 100, "disk_bytes": 20, "disk_limit": 200, "blocks": 3, "snapshots": 2,
        "lookups": 8, "hits": 6, "prompt_tokens": 1000, "reused_tokens": 900,
        "written_bytes": 3, "writes_limit": 9, "writes_left": 2,
    }  # fmt: skip
    return PrefixStatus(**{**whole, **fields})


def status(
    line: Line, line_errors: dict[str, int] | None = None, http_counters: HttpCounters | None = None
) -> dict[str, Any]:
    """Return the status of a gateway that runs for 30 s, with a wall clock 500 s behind the monotonic one."""
    moment = StatusSnapshot(line.clock.now, line.clock.now - 500.0)
    return report.status(
        line.dispatcher, http_counters or HttpCounters(), line_errors or {}, moment, line.clock.now - 30.0
    )


def workers(line: Line) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = status(line)["workers"]
    return told


def test_a_gateway_alone_tells_of_itself() -> None:
    line = Line()
    http_counters = HttpCounters()
    http_counters.answered(200)
    told = status(line, {"decode": 3}, http_counters)
    assert told["gateway"].pop("version").count(".") == 2
    assert told == {
        "object": "status",
        "time": 500.0,
        "gateway": {
            "uptime_s": 30.0, "in_flight": 0, "between_workers": 0, "media_bytes": 0, "memory_budget": None,
            "stopping": False, "captured": None, "failover": {}, "continued_by": {}, "dropped": {},
            "line_errors": {"decode": 3}, "responses": {"200": 1}, "errors": {},
            "connections_turned_away": 0,
        },
        "models": [],
        "workers": [],
        "requests": [],
        "recent": {"ends": [], "failures": [], "refusals": [], "workers": []},
    }  # fmt: skip


def test_a_model_is_told_of_whether_or_not_it_is_loaded() -> None:
    line = Line()
    line.dispatcher.catalogue.on_model_states(
        ModelStates(
            models=[
                ModelState(
                    name="kept", stage="running", aliases=["small"], resident=True, memory_bytes=7,
                    restarts=2, last_end="worker (pid 9) was killed by SIGKILL after 3.0 s",
                    last_end_reason="sigkill", failure="no such model",
                ),
                ModelState(name="other"),
            ],
            on_demand=True,
        )
    )  # fmt: skip
    secret = request("x", prompt="secret prompt", cache_salt="secret salt")
    with line.dispatcher.submit(line.dispatcher.find("other"), [secret], ()):
        told = status(line)
    assert (told["gateway"]["in_flight"], "secret" in str(told)) == (1, False)
    kept, other = told["models"]
    assert kept == {
        "model": "kept", "aliases": ["small"], "state": "loading", "resident": True, "on_demand": False,
        "pinned": False, "weight_bytes": None, "memory_bytes": 7, "waiting": 0, "replicas": 1,
        "restarts": 2, "failure": "no such model",
        "last_end": "worker (pid 9) was killed by SIGKILL after 3.0 s", "last_end_reason": "sigkill",
        "losses": {}, "answered_tokens": 0, "adapters": [],
    }  # fmt: skip
    assert (other["model"], other["state"], other["waiting"]) == ("other", "unloaded", 1)
    assert other["on_demand"]


def touch() -> dict[str, Any]:
    """Return the report of a worker whose last heartbeat, 2.5 s ago, had every field."""
    line = Line()
    line.serving("w", "org/model", host="mac.local")
    beat = Heartbeat(
        incarnation="w", running=1, waiting=2, steps=5, cache_bytes=77, rows=[DECODING, WAITING],
        prefix=prefix(),
        resources=Resources(
            resident_bytes=11, device_bytes=12, device_peak_bytes=13, device_spare_bytes=14,
            footprint_bytes=15, uptime_s=99.5,
            experts=ExpertStatus(
                slots=2, experts=8, bytes=100, wanted=40, read=10, read_bytes=500, read_s=1.2349
            ),
            ranks=[RankMemory(rank=1, host="mac-2", resident_bytes=21, device_bytes=22)],
        ),
        images=ImageStatus(bytes=10, bytes_max=100, kept=2, encoded=3, hits=4),
        drafts=SpecDecodeStatus(accepted=30, rejected=5, sources={"model": SpecDecodeStats(accepted=30)}),
        preparation=PreparationStatus(
            waiting=3, running=2, bytes=9, oldest_s=0.12345, started=8, waited_s=1.5
        ),
        pressure=MemoryPressure(level="critical", relief="drop_idle"),
    )  # fmt: skip
    line.dispatcher.on_message("w", beat)
    line.clock.now += 2.5
    [worker] = workers(line)
    return worker


def test_a_worker_is_told_with_what_it_last_said_of_itself() -> None:
    worker = touch()
    rows, cache = worker.pop("rows"), worker.pop("prefix")
    assert rows == [
        {
            "id": "a", "phase": "decode", "prompt_tokens": 100, "prefilled": 100, "answered": 21,
            "seconds": 3.0, "time_to_first_token_s": 1.0, "tokens_per_s": 10.0,
            "reuse": {"tokens": 96, "tier": "disk", "miss": "diverged"}, "preemptions": 3,
        },
        {
            "id": "b", "phase": "waiting", "prompt_tokens": 7, "prefilled": 0, "answered": 0,
            "seconds": 0.5, "time_to_first_token_s": None, "tokens_per_s": None, "reuse": None,
            "preemptions": 0,
        },
    ]  # fmt: skip
    assert (cache["ram_bytes"], cache["hit_rate"], cache["token_hit_rate"]) == (10, 0.75, 0.9)
    assert "top" not in cache
    sources = {"model": {"accepted": 30, "rejected": 0}}
    assert worker.pop("drafts") == {"accepted": 30, "rejected": 5, "sources": sources}
    assert worker.pop("preparation") == {
        "waiting": 3, "running": 2, "bytes": 9, "oldest_s": 0.123, "started": 8, "waited_s": 1.5,
        "refused": 0, "cancelled": 0,
    }  # fmt: skip
    assert worker.pop("pressure") == {"level": "critical", "relief": "drop_idle"}
    assert worker.pop("images") == {"bytes": 10, "bytes_max": 100, "kept": 2, "encoded": 3, "hits": 4}
    memory = {"resident_bytes": 21, "device_bytes": 22, "device_peak_bytes": 0, "device_spare_bytes": 0}
    memory["footprint_bytes"] = 0
    assert worker.pop("ranks") == [{"rank": 1, "host": "mac-2", "memory": memory}]
    assert worker == {
        "model": "org/model", "state": "ready", "start_s": {}, "incarnation": "w", "pid": 1,
        "host": "mac.local", "plan": "", "stands_in": False,
        "experts": {
            "slots": 2, "experts": 8, "bytes": 100, "wanted": 40, "read": 10, "read_bytes": 500,
            "read_s": 1.235, "hit_rate": 0.75,
        },
        "exactness": None, "connected_s": 2.5, "uptime_s": 99.5, "loading": None, "context_length": 8192,
        "running_max": 4, "parameters": 0,
        "memory": {
            "resident_bytes": 11, "device_bytes": 12, "device_peak_bytes": 13, "device_spare_bytes": 14,
            "footprint_bytes": 15,
        },
        "running": 1, "waiting": 2, "dispatched": 0, "assigned": 0,
        "speed": {"prompt_tokens_per_s": None, "answer_tokens_per_s": None},
        "steps": 5, "starved": 0, "cache_bytes": 77, "cache_bytes_max": 2**30, "tokens_max": 4096,
    }  # fmt: skip


def test_every_state_of_a_worker_has_its_name() -> None:
    line = Line()
    line.hello("w")
    line.dispatcher.on_message("w", Loading(incarnation="w", done=0, total=9))
    [loading] = workers(line)
    assert (loading["state"], loading["rows"], loading["prefix"]) == ("loading", [], None)
    assert loading["loading"] == {"done": 0, "total": 9}
    assert (loading["uptime_s"], loading["memory"]) == (None, None)
    line.serving("w")
    assert workers(line)[0]["state"] == "ready"
    line.clock.now += SILENT_S + 1
    line.dispatcher.sweep()
    assert workers(line)[0]["state"] == "silent"
    line.beat("w", running=1)
    for _ in range(int(STALL_S) + 2):
        line.clock.now += 1
        line.beat("w", running=1)
        line.dispatcher.sweep()
    assert workers(line)[0]["state"] == "stalled"
    line.dispatcher.lost("w")
    assert workers(line) == []


def test_failovers_and_dropped_messages_are_counted() -> None:
    line = Line()
    line.serving("w1")
    line.submit(request("a"))
    line.dispatcher.lost("w1")
    assert status(line)["gateway"]["between_workers"] == 1
    line.serving("w2")
    line.say("w1", finished("w1", "a"))
    told = status(line)["gateway"]
    assert told["between_workers"] == 0
    assert told["failover"] == {"grounded": 1, "resumed": 1}
    assert told["dropped"] == {"unknown_sender": 1}


def test_speed_is_that_of_the_tokens_behind_the_first() -> None:
    line = Line()
    line.serving("w")
    began = RequestStatus(id="a", phase="decode", prompt_tokens=1, first_token_s=1.0)
    progress = ((1, 2.0), (2, 1.0), (3, 5.0))
    rows = [replace(began, answered=answered, seconds=seconds) for answered, seconds in progress]
    line.beat("w", running=1, rows=rows)
    assert [row["tokens_per_s"] for row in workers(line)[0]["rows"]] == [None, None, 0.5]


def test_the_cache_of_a_model_is_that_of_all_its_workers() -> None:
    line = Line()
    for worker, model in (("w1", "m"), ("w2", "m"), ("w3", "bare")):
        line.serving(worker, model)
    line.beat("w1", prefix=prefix(misses={"off": 1, "incomplete": 2}))
    line.beat("w2", prefix=prefix(lookups=2, hits=0, misses={"off": 2}))
    line.beat("w3")
    bare, cache = report.caches(line.dispatcher.fleet)["data"]
    assert (bare["model"], bare["enabled"], bare["hit_rate"]) == ("bare", False, None)
    assert cache == {
        "model": "m", "enabled": True, "ram_bytes": 20, "ram_limit": 200, "disk_bytes": 40, "disk_limit": 400,
        "blocks": 6, "snapshots": 4, "lookups": 10, "hits": 6, "prompt_tokens": 2000, "reused_tokens": 1800,
        "read_timeouts": 0, "written_bytes": 6, "writes_limit": 9, "writes_left": 2,
        "hit_rate": 0.6, "token_hit_rate": 0.9, "misses": {"off": 3, "incomplete": 2},
    }  # fmt: skip
