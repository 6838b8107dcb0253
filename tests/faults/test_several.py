"""Several models behind one gateway: loaded on request, unloaded when idle, with isolated faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.several import Scripted, Several, several
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually, is_ready, stable

MB = 10**6
WHY_BROKEN = "scripted: the model cannot be loaded"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """Run models without a memory budget. Each test loads what it needs; `lazy` and `bad` have one test."""
    models = Scripted("first"), Scripted("second"), Scripted("bad", "--broken")
    lazy = Scripted("lazy", "--step-ms 20 --load 1.5", aliases=["gpt-4o-mini"])
    flags = "--keepalive 0.2"
    with several(tmp_path_factory.mktemp("models"), *models, lazy, gateway_flags=flags) as served:
        yield served


def load(served: Several, *models: str) -> list[int]:
    """Load these models by a request to each; return the process ids of their workers."""
    for model in models:
        wait_for([client := ask(served.url, "!tokens=5", model=model)], 60)
        assert client.texts == [scripted("!tokens=5", 5)]
    return [pid for model in models for pid in served.pids(model)]


def test_a_request_for_a_model_that_is_not_loaded_waits_for_it(served: Several) -> None:
    served.wait_for(first="loaded", lazy="unloaded")
    listed = {model["id"]: model for model in served.http.get("/v1/models").json()["data"]}
    assert (listed["first"]["context_length"], listed["first"]["aliases"]) == (8192, [])
    assert listed["lazy"]["aliases"] == ["gpt-4o-mini"]
    assert "context_length" not in listed["lazy"]
    assert served.http.get("/v1/models/gpt-4o-mini").json()["id"] == "lazy"
    stream = ask(served.url, "!tokens=20", model="lazy")
    whole = ask(served.url, "!tokens=20", stream=False, model="gpt-4o-mini")
    unnamed, unknown = ask(served.url, "!tokens=3", stream=False), ask(served.url, "x", model="third")
    served.wait_for(lazy="loading")
    eventually(lambda: b": keep-alive" in stream.read, within_s=10, what="a sign of life")
    wait_for([stream, whole, unnamed, unknown], 60)
    assert stream.texts == whole.texts == [scripted("!tokens=20", 20)]
    # The answer names the model that served it, not the requested one.
    assert {document["model"] for document in [*stream.documents, *whole.documents]} == {"lazy"}
    assert unnamed.documents[0]["model"] == "first"
    assert (unknown.status, unknown.error) == (404, "model_not_found")
    assert "bad, first, lazy, second" in unknown.documents[0]["error"]["message"]


def test_the_death_of_one_is_no_affair_of_the_others(served: Several) -> None:
    untouched, pid = load(served, "first", "second")
    before = served.status()["gateway"]["failover"].get("grounded", 0)
    clients = [ask(served.url, "!tokens=75", model=name) for name in ("first", "second") * 2]
    wait_until_flowing(clients)
    os.kill(pid, signal.SIGKILL)
    wait_for(clients, 60)
    assert [client.texts for client in clients] == [[scripted("!tokens=75", 75)]] * 4
    assert served.pids("first") == [untouched]
    assert served.pids("second") != [pid]
    assert served.status()["gateway"]["failover"]["grounded"] == before + 2


def test_model_that_fails_to_load_fails_only_its_own_requests(served: Several) -> None:
    good = ask(served.url, "!tokens=75", model="first")
    wait_until_flowing([good])
    for _ in range(2):
        wait_for([bad := ask(served.url, "x", stream=False, model="bad")], 60)
        assert (bad.status, bad.error) == (503, "model_failed")
        assert bad.headers["x-should-retry"] == "false"
        assert WHY_BROKEN in bad.documents[0]["error"]["message"]
    told = next(model for model in served.status()["models"] if model["model"] == "bad")
    assert WHY_BROKEN in told["failure"]
    assert (told["restarts"], told["last_end_reason"]) == (1, "exit_78")
    assert served.states()["bad"] == "failed"
    wait_for([good], 60)
    assert good.texts == [scripted("!tokens=75", 75)]
    assert served.http.get("/ready").status_code == 200
    # After a failure it is not restarted for a while, except on request.
    done, text = served.reload("bad")
    assert done, text
    served.wait_for(bad="unloaded")


def test_reload_without_a_name_replaces_every_one_that_runs(served: Several) -> None:
    before = load(served, "first", "second")
    running = [name for name, state in served.states().items() if state == "loaded"]
    clients = [ask(served.url, "!tokens=50", model=name) for name in ("first", "second")]
    wait_until_flowing(clients)
    done, text = served.reload()
    assert done, text
    assert len(text.splitlines()) == len(running)
    wait_for(clients, 60)
    assert [client.texts for client in clients] == [[scripted("!tokens=50", 50)]] * 2
    assert not set(before) & {*served.pids("first"), *served.pids("second")}


def test_a_gateway_that_returns_finds_the_models_loaded(served: Several) -> None:
    pids = load(served, "first", "second")
    workers = {worker["pid"] for worker in served.status()["workers"]}
    [gateway] = stable(
        lambda: [p for p in served.process.stats.children() if p.pid not in workers],
        within_s=30,
        what="one process beside the workers",
        accept=lambda found: len(found) == 1,
    )
    gateway.kill()
    eventually(lambda: is_ready(served.http), within_s=30, what="a new gateway")
    served.wait_for(first="loaded", second="loaded")
    assert served.pids("first") + served.pids("second") == pids


def test_stream_of_a_replaced_model_is_not_resumed_by_its_successor(served: Several) -> None:
    [pid] = load(served, "second")
    client = ask(served.url, "!tokens=2000", model="second")
    wait_until_flowing([client])
    said = len(served.process.log())
    swap = threading.Thread(target=served.reload, args=("second", served.make_weights("other", 0)))
    swap.start()
    eventually(
        lambda: "finishes its requests" in served.process.log()[said:], within_s=60, what="the new one serves"
    )
    os.kill(pid, signal.SIGKILL)
    wait_for([client], 60)
    swap.join(60)
    assert client.error == "worker_unavailable"
    assert "was replaced by a different one" in client.documents[-1]["error"]["message"]


# --- other settings ------------------------------------------------------------------------------------


def test_idle_models_are_unloaded_with_all_replicas_and_reloaded_on_request(tmp_path: Path) -> None:
    models = Scripted("kept", resident=True), Scripted("other", replicas=2)
    with several(tmp_path, *models, gateway_flags="--unload-after 0.5") as served:
        served.wait_for(kept="loaded", other="unloaded")
        for _ in range(2):
            load(served, "other")
            served.wait_for(other="unloaded")
            eventually(lambda: served.pids("other") == [], within_s=30, what="both processes are gone")
        assert served.states()["kept"] == "loaded"


def test_the_one_that_is_unused_for_longest_makes_room_and_one_in_use_does_not(tmp_path: Path) -> None:
    # A scripted worker uses some tens of megabytes; the simulated weights are far larger.
    models = [Scripted(name, weight_bytes=1000 * MB) for name in ("a", "b", "c")]
    with several(tmp_path, *models, budget=2500 * MB) as served:
        for name in ("a", "b", "c", "a"):
            load(served, name)
            assert sum(state == "loaded" for state in served.states().values()) <= 2
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        running = [ask(served.url, f"!tokens={n}", model=name) for n, name in ((100, "a"), (250, "c"))]
        wait_until_flowing(running)
        (pid,), untouched = served.pids("a"), served.pids("c")
        waiting = ask(served.url, "!tokens=10", model="b")
        wait_for([waiting, *running], 60)
        assert [client.texts for client in running] == [[scripted(f"!tokens={n}", n)] for n in (100, 250)]
        assert waiting.texts == [scripted("!tokens=10", 10)]
        assert running[0].ended_at < waiting.ended_at
        assert (served.pids("a"), served.pids("c")) == ([], untouched)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_request_that_waits_too_long_for_a_model_gets_a_503(tmp_path: Path) -> None:
    models = Scripted("first"), Scripted("slow", "--load 60")
    flags = "--load-timeout 0.5 --keepalive 0.1"
    with several(tmp_path, *models, gateway_flags=flags) as served:
        whole = ask(served.url, "x", stream=False, model="slow")
        stream = ask(served.url, "x", model="slow")
        wait_for([whole, stream], 30)
        assert (whole.status, whole.error) == (503, "model_loading")
        assert "retry-after" in whole.headers
        assert (stream.status, stream.error) == (200, "model_loading")


def test_a_swap_costs_nobody_anything_beside_the_old_one_or_after_it(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a", weight_bytes=1000 * MB), budget=2500 * MB) as served:
        served.wait_for(a="loaded")
        for size, how in ((1000 * MB, "has taken over"), (2000 * MB, "was stopped and started again")):
            old = [ask(served.url, "!tokens=75", stream=bool(n % 2), model="a") for n in range(4)]
            wait_until_flowing(old[1::2])
            pids = served.pids("a")
            done, text = served.reload("a", served.make_weights(f"of-{size}", size))
            assert done, text
            assert how in text
            new = ask(served.url, "!tokens=10", model="a")
            wait_for([*old, new], 60)
            assert [client.texts for client in old] == [[scripted("!tokens=75", 75)]] * 4
            assert new.texts == [scripted("!tokens=10", 10)]
            eventually(lambda: len(served.pids("a")) == 1, within_s=30, what="the old one is gone")
            assert served.pids("a") != pids
        assert "resumed" not in served.status()["gateway"]["failover"]
