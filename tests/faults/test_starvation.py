"""The progress watchdogs, with real processes and a worker whose scheduler forgets requests."""

from __future__ import annotations

import time
from pathlib import Path

from tests.faults.forgetful import FORGOTTEN_TOKENS
from tests.faults.streams import ask, scripted, wait_for, wait_until_flowing
from tests.system import Process, System, eventually, running_system
from worker.process.exit_codes import EXIT_BROKEN

STALL_S = 4
"""The worker restarts a starved row after a quarter of this, and ends itself after another quarter."""
IDLE_CPU_MAX = 0.2
"""Maximum share of a core while the only request is not scheduled; a spinning loop uses a whole core."""
OTHER_TOKENS = 150
QUESTION = f"who was forgotten? !tokens={FORGOTTEN_TOKENS}"
OTHERS = f"somebody else !tokens={OTHER_TOKENS} !slow=20"


def _start(system: System, how: str, *flags: str) -> Process:
    """Start a worker that forgets requests, or a normal one if `how` is empty."""
    if not how:
        return system.start_worker(*flags)
    return system.start_worker(*flags, module="tests.faults.forgetful", env={"TESTS_FORGETS": how})


def _phases(system: System) -> dict[str, str]:
    workers = system.http.get("/v1/status").json()["workers"]
    return {row["id"]: row["phase"] for worker in workers for row in worker["rows"]}


def test_worker_restarts_a_request_that_its_scheduler_has_lost(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = _start(system, "once", f"--stall-timeout={STALL_S}")
        system.wait_ready()
        for count, beside in enumerate((0, 2), start=1):
            others = [ask(system.url, OTHERS, max_tokens=OTHER_TOKENS) for _ in range(beside)]
            wait_until_flowing(others)
            lost = ask(system.url, QUESTION, max_tokens=FORGOTTEN_TOKENS)
            wait_for([lost, *others], 60)
            assert lost.texts == [scripted(QUESTION, FORGOTTEN_TOKENS)]
            assert [other.reasons for other in others] == [["length"]] * beside
            eventually(lambda n=count: _starved(system) == n, within_s=5, what="the starvation is counted")
        assert worker.running
        assert "no progress" in worker.log()


def test_worker_ends_itself_when_a_restart_is_in_vain_and_the_next_one_answers(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = _start(system, "always", f"--stall-timeout={STALL_S}")
        system.wait_ready()
        other = ask(system.url, OTHERS, max_tokens=OTHER_TOKENS)
        wait_until_flowing([other])
        lost = ask(system.url, QUESTION, max_tokens=FORGOTTEN_TOKENS)
        assert worker.wait(20) == EXIT_BROKEN
        assert "made no progress after it was restarted" in worker.log()
        _start(system, "")
        lost.join(20)
        assert lost.texts == [scripted(QUESTION, FORGOTTEN_TOKENS)]
        other.join(60)
        assert other.texts == [scripted(OTHERS, OTHER_TOKENS)]


def test_gateway_ends_a_worker_that_starves_a_request_again_or_hands_it_to_another(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--stall-timeout", "2"]) as system:
        worker = _start(system, "unnoticed")
        system.wait_ready()
        lost = ask(system.url, QUESTION, max_tokens=FORGOTTEN_TOKENS)
        assert worker.wait(30) == -9
        assert "no progress on its worker" in system.gateway.log()
        assert "is starving" in system.gateway.log()
        worker = _start(system, "unnoticed")
        _start(system, "")
        eventually(lambda: _ready(system) == 2, within_s=60, what="both workers are ready")
        questions = [f"{number} {QUESTION}" for number in range(6)]
        clients = [ask(system.url, question, max_tokens=FORGOTTEN_TOKENS) for question in questions]
        wait_for([lost, *clients], 60)
        for question, client in zip([QUESTION, *questions], [lost, *clients], strict=True):
            assert client.texts == [scripted(question, FORGOTTEN_TOKENS)]
        assert worker.running


def test_worker_whose_only_request_is_held_takes_no_processor_time(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        worker = _start(system, "unnoticed")
        system.wait_ready()
        ask(system.url, QUESTION, max_tokens=FORGOTTEN_TOKENS)
        eventually(lambda: "waiting" in _phases(system).values(), within_s=10, what="the worker has it")
        steps = _worker(system)["steps"]
        before, began = sum(worker.stats.cpu_times()[:2]), time.monotonic()
        time.sleep(2)
        used = sum(worker.stats.cpu_times()[:2]) - before
        assert used < IDLE_CPU_MAX * (time.monotonic() - began)
        # Empty steps are not counted.
        assert _worker(system)["steps"] == steps
        for process in (system.gateway, worker):  # instead of a wait for the request
            process.kill()


def _ready(system: System) -> int:
    return sum(worker["state"] == "ready" for worker in system.http.get("/v1/status").json()["workers"])


def _worker(system: System) -> dict[str, int]:
    [worker] = system.http.get("/v1/status").json()["workers"]
    return dict(worker)


def _starved(system: System) -> int:
    return _worker(system)["starved"]
