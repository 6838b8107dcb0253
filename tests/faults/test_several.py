"""Several models behind one gateway: loaded on request, unloaded when idle, with isolated faults."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tests.faults.several import Scripted, several
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import eventually, stable

MB = 10**6
WHY_BROKEN = "scripted: the model cannot be loaded"


def test_a_request_for_a_model_that_is_not_loaded_waits_for_it(tmp_path: Path) -> None:
    models = Scripted("first"), Scripted("second", "--load 1.5", aliases=["gpt-4o-mini"])
    with several(tmp_path, *models, gateway_flags="--keepalive 0.2") as served:
        served.wait_for(first="loaded", second="unloaded")
        stream = ask(served.url, "!tokens=20", model="second")
        whole = ask(served.url, "!tokens=20", stream=False, model="gpt-4o-mini")
        served.wait_for(second="loading")
        eventually(lambda: b": keep-alive" in stream.read, within_s=10, what="a sign of life")
        wait_for([stream, whole], 60)
        assert stream.texts == whole.texts == [scripted("!tokens=20", 20)]
        # The answer names the model that served it, not the requested one.
        assert {document["model"] for document in [*stream.documents, *whole.documents]} == {"second"}
        unnamed = ask(served.url, "!tokens=3", stream=False)
        wait_for([unnamed], 60)
        assert unnamed.documents[0]["model"] == "first"


def test_models_are_told_apart_and_an_alias_is_answered_with_what_it_stands_for(tmp_path: Path) -> None:
    models = Scripted("first"), Scripted("second", aliases=["gpt-4o-mini"])
    with several(tmp_path, *models) as served:
        served.wait_for(first="loaded")
        first, second = served.http.get("/v1/models").json()["data"]
        assert (first["context_length"], first["aliases"], first["state"]) == (8192, [], "loaded")
        assert (second["aliases"], second["state"]) == (["gpt-4o-mini"], "unloaded")
        assert "context_length" not in second
        assert served.http.get("/v1/models/gpt-4o-mini").json()["id"] == "second"
        unknown = ask(served.url, "x", model="third")
        wait_for([unknown], 30)
        assert (unknown.status, unknown.error) == (404, "model_not_found")
        assert "first, second" in unknown.documents[0]["error"]["message"]


def test_idle_model_is_unloaded_and_reloaded_on_request(tmp_path: Path) -> None:
    models = Scripted("kept", resident=True), Scripted("other")
    with several(tmp_path, *models, gateway_flags="--unload-after 0.5") as served:
        served.wait_for(kept="loaded")
        for _ in range(2):
            client = ask(served.url, "!tokens=10", model="other")
            wait_for([client], 60)
            assert client.texts == [scripted("!tokens=10", 10)]
            served.wait_for(other="unloaded")
            eventually(lambda: served.pids("other") == [], within_s=30, what="its process is gone")
        assert served.states()["kept"] == "loaded"


def test_the_one_that_is_unused_for_longest_makes_room_and_no_more_than_fit_are_loaded(
    tmp_path: Path,
) -> None:
    # A scripted worker uses some tens of megabytes; the simulated weights are far larger.
    models = [Scripted(name, weight_bytes=1000 * MB) for name in ("a", "b", "c")]
    with several(tmp_path, *models, budget=2500 * MB) as served:
        for name in ("a", "b", "c", "a"):
            client = ask(served.url, "!tokens=10", model=name)
            wait_for([client], 60)
            assert client.texts == [scripted("!tokens=10", 10)]
            assert sum(state == "loaded" for state in served.states().values()) <= 2
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_one_in_use_is_not_unloaded_for_another_which_waits_for_its_end(tmp_path: Path) -> None:
    models = [Scripted(name, weight_bytes=1000 * MB) for name in ("a", "b")]
    with several(tmp_path, *models, budget=1500 * MB) as served:
        running = ask(served.url, "!tokens=400", model="a")
        wait_until_flowing([running])
        (pid,) = served.pids("a")
        waiting = ask(served.url, "!tokens=10", model="b")
        wait_for([waiting, running], 60)
        assert running.texts == [scripted("!tokens=400", 400)]
        assert waiting.texts == [scripted("!tokens=10", 10)]
        assert running.ended_at < waiting.ended_at
        assert served.pids("a") == []
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_death_of_one_is_no_affair_of_the_others(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a", resident=True), Scripted("b", resident=True)) as served:
        served.wait_for(a="loaded", b="loaded")
        clients = [ask(served.url, "!tokens=300", model=name) for name in ("a", "b", "a", "b")]
        wait_until_flowing(clients)
        (pid,) = served.pids("b")
        untouched = served.pids("a")
        os.kill(pid, signal.SIGKILL)
        wait_for(clients, 60)
        assert [client.texts for client in clients] == [[scripted("!tokens=300", 300)]] * 4
        assert served.pids("a") == untouched
        assert served.pids("b") != [pid]
        assert served.status()["gateway"]["failover"]["grounded"] == 2


def test_model_that_fails_to_load_fails_only_its_own_requests(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("good"), Scripted("bad", "--broken")) as served:
        served.wait_for(good="loaded")
        good = ask(served.url, "!tokens=300", model="good")
        wait_until_flowing([good])
        for _ in range(2):
            bad = ask(served.url, "x", model="bad")
            wait_for([bad], 60)
            assert (bad.status, bad.error) == (503, "model_failed")
            assert bad.headers["x-should-retry"] == "false"
            assert WHY_BROKEN in bad.documents[0]["error"]["message"]
        told = next(model for model in served.status()["models"] if model["model"] == "bad")
        assert WHY_BROKEN in told["failure"]
        assert (told["restarts"], told["last_end_reason"]) == (1, "exit_78")
        assert served.states()["bad"] == "failed"
        wait_for([good], 60)
        assert good.texts == [scripted("!tokens=300", 300)]
        assert served.http.get("/ready").status_code == 200
        # After a failure it is not restarted for a while, except on request.
        done, text = served.reload("bad")
        assert done, text
        served.wait_for(bad="unloaded")


def test_resident_model_that_fails_to_load_leaves_the_memory_to_others(tmp_path: Path) -> None:
    # Without weights on the disk, its size is unknown.
    models = Scripted("bad", "--broken", resident=True), Scripted("good")
    with several(tmp_path, *models, budget=1000 * MB) as served:
        served.wait_for(bad="failed")
        client = ask(served.url, "!tokens=10", model="good")
        wait_for([client], 60)
        assert client.texts == [scripted("!tokens=10", 10)]
        listed = served.http.get("/v1/models/bad").json()
        assert (listed["state"], listed["failure"]) == ("failed", WHY_BROKEN)


def test_model_larger_than_the_memory_budget_is_refused_at_once(tmp_path: Path) -> None:
    models = Scripted("small", weight_bytes=100 * MB), Scripted("huge", weight_bytes=9000 * MB)
    with several(tmp_path, *models, budget=1000 * MB) as served:
        client = ask(served.url, "x", model="huge")
        wait_for([client], 30)
        assert (client.status, client.error) == (503, "model_failed")
        assert "9.0 GB" in client.documents[0]["error"]["message"]


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


def test_a_gateway_that_returns_finds_the_models_loaded(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a"), Scripted("b")) as served:
        wait_for([client := ask(served.url, "!tokens=5", model="b")], 60)
        assert client.texts
        served.wait_for(a="loaded", b="loaded")
        pids = served.pids("a") + served.pids("b")
        [gateway] = stable(
            lambda: [p for p in served.process.stats.children() if p.pid not in pids],
            within_s=30,
            what="one process beside the workers",
            accept=lambda found: len(found) == 1,
        )
        gateway.kill()
        eventually(served.answers, within_s=30, what="a new gateway")
        served.wait_for(a="loaded", b="loaded")
        assert served.pids("a") + served.pids("b") == pids


def test_gateway_and_workers_exit_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a", resident=True), Scripted("b", resident=True)) as served:
        served.wait_for(a="loaded", b="loaded")
        family = stable(
            lambda: served.process.stats.children(recursive=True),
            within_s=30,
            what="a gateway and two workers",
            accept=lambda found: len(found) == 3,
        )
        served.process.kill()
        served.process.wait()
        gone, alive = psutil.wait_procs(family, timeout=15)
        assert (len(gone), alive) == (3, [])


@pytest.mark.parametrize(
    ("fits", "budget", "how"),
    [
        (True, 2500 * MB, "has taken over"),
        (True, 1500 * MB, "was stopped and started again"),
        (False, 2500 * MB, "was stopped and started again"),
    ],
    ids=["beside", "no budget for two", "no memory for two"],
)
def test_a_swap_costs_nobody_anything(tmp_path: Path, fits: bool, budget: int, how: str) -> None:
    models = Scripted("a", weight_bytes=1000 * MB), Scripted("b", weight_bytes=1000 * MB)
    with several(tmp_path, *models, fits=fits, budget=budget) as served:
        served.wait_for(a="loaded")
        old = [ask(served.url, "!tokens=300", stream=bool(n % 2), model="a") for n in range(8)]
        wait_until_flowing(old[1::2])
        pids = served.pids("a")
        done, text = served.reload("a", served.make_weights("other", 1000 * MB))
        assert done, text
        assert how in text
        new = ask(served.url, "!tokens=10", model="a")
        wait_for([*old, new], 60)
        assert [client.texts for client in old] == [[scripted("!tokens=300", 300)]] * 8
        assert new.texts == [scripted("!tokens=10", 10)]
        eventually(lambda: len(served.pids("a")) == 1, within_s=30, what="the old one is gone")
        assert served.pids("a") != pids
        assert "resumed" not in served.status()["gateway"]["failover"]


def test_stream_of_a_replaced_model_is_not_resumed_by_its_successor(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a", "--step-ms 20"), Scripted("b")) as served:
        served.wait_for(a="loaded")
        client = ask(served.url, "!tokens=2000", model="a")
        wait_until_flowing([client])
        (pid,) = served.pids("a")
        swap = threading.Thread(target=served.reload, args=("a", served.make_weights("other", 0)))
        swap.start()
        eventually(
            lambda: "finishes its requests" in served.process.log(), within_s=60, what="the new one serves"
        )
        os.kill(pid, signal.SIGKILL)
        wait_for([client], 60)
        swap.join(60)
        assert client.error == "worker_unavailable"
        assert "was replaced by a different one" in client.documents[-1]["error"]["message"]


def test_reload_without_a_name_replaces_every_one_that_runs(tmp_path: Path) -> None:
    with several(tmp_path, Scripted("a"), Scripted("b"), Scripted("c")) as served:
        wait_for([ask(served.url, "!tokens=5", model="b")], 60)
        served.wait_for(a="loaded", b="loaded", c="unloaded")
        clients = [ask(served.url, "!tokens=200", model=name) for name in ("a", "b")]
        wait_until_flowing(clients)
        before = served.pids("a") + served.pids("b")
        done, text = served.reload()
        assert done, text
        assert len(text.splitlines()) == 2
        wait_for(clients, 60)
        assert [client.texts for client in clients] == [[scripted("!tokens=200", 200)]] * 2
        after = served.pids("a") + served.pids("b")
        assert len(set(before + after)) == 4
        assert served.states()["c"] == "unloaded"
        assert served.reload("nobody") == (False, "there is no model nobody; the models are: a, b, c")
