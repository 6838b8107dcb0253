"""Flights survive the loss of their worker: killed, stopped, or crashed by a request."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults import failover
from tests.faults.questions import image_url, seeing_body, seen_in
from tests.faults.several import Served, serving
from tests.faults.streams import Client, ask, scripted, wait_for, wait_until_flowing, wait_until_taken
from tests.system import chat_body, eventually, running_system

STEP = ("--step-ms", "40", "--images")
TOKENS = 38
POISON = "a poisoned one !die=4 !tokens=10"
POISON_AT_ONCE = "a poisoned one !burst"
CLIENTS = 8


def crashes(served: Served) -> int:
    return served.process.log().count("worker runs as pid") - 1


def prompt(number: int, tokens: int) -> str:
    return f"{'go ' * (1 + number)}!tokens={tokens}"


def ask_many(url: str, count: int, tokens: int) -> list[Client]:
    """Start clients, alternately streaming, and wait until all requests are in flight."""
    clients = [ask(url, prompt(n, tokens), stream=n % 2 == 0) for n in range(count)]
    wait_until_taken(url, clients)
    return clients


def assert_undisturbed(clients: list[Client], tokens: int) -> None:
    for number, client in enumerate(clients):
        assert client.texts == [scripted(prompt(number, tokens), tokens)]
        assert client.completion_tokens == tokens + 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "clients"), [("scripted", CLIENTS), ("embedded", 3)])
def test_kill_at_any_instant_costs_clients_a_pause(tmp_path: Path, model: str, clients: int) -> None:
    with running_system(tmp_path) as system:
        # With this seed the two questions are a tool call with reasoning, and an image with a schema.
        outcome = failover.run(system, model, 1, seed=12, clients=clients, known=2)
    assert outcome.wrong == []
    assert outcome.answers >= clients


def test_a_worker_killed_while_it_encodes_an_image_or_answers_costs_nobody_an_answer(tmp_path: Path) -> None:
    with serving(tmp_path, " ".join(STEP)) as served:
        for count, direction, tokens in ((1, "!look=1000", 30), (2, "", TOKENS)):
            streams = [ask(served.url, prompt(n, TOKENS)) for n in range(4)]
            wait_until_flowing(streams)
            text, images = f"look {direction} !tokens={tokens}", [image_url(1), image_url(2)]
            seeing = Client(served.url, seeing_body(text, images, stream=not direction))
            seeing.start()
            if direction:
                eventually(
                    lambda: sum(worker["running"] for worker in served.status()["workers"]) > 4,
                    within_s=20,
                    what="the image is begun",
                )
                assert not seeing.read
            else:
                wait_until_flowing([seeing])
            os.kill(served.wait_ready(), signal.SIGKILL)
            wait_for([*streams, seeing], 60)
            assert crashes(served) == count
            assert_undisturbed(streams, TOKENS)
            assert seeing.texts == [scripted(text, tokens, seen=[*map(seen_in, images)])]


def test_a_stopped_worker_is_replaced_or_goes_on_and_says_nothing_twice_when_it_wakes(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--silent-after", "1"]) as system:
        stopped = system.start_ready_worker(*STEP)
        for replaced in (False, True):
            clients, said = ask_many(system.url, 4, 2 * TOKENS), len(system.gateway.log())
            wait_until_flowing(clients[::2])
            stopped.kill(signal.SIGSTOP)
            eventually(
                lambda said=said: "is silent" in system.gateway.log()[said:],
                within_s=30,
                what="the worker is silent",
            )
            refused = system.http.post("/v1/chat/completions", json=chat_body("hi"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
            if replaced:
                system.start_ready_worker(*STEP)
            stopped.kill(signal.SIGCONT)
            wait_for(clients, 60)
            assert_undisturbed(clients, 2 * TOKENS)
            system.wait_ready()


def test_requests_fail_when_no_worker_returns_within_the_failover_timeout(tmp_path: Path) -> None:
    with running_system(tmp_path, ["--failover-timeout", "1", "--keepalive", "0.2"]) as system:
        worker = system.start_ready_worker(*STEP)
        clients = [ask(system.url, "!tokens=1000", stream=stream) for stream in (True, False)]
        streamed, whole = clients
        wait_until_taken(system.url, clients)
        wait_until_flowing([streamed])
        worker.kill()
        wait_for(clients, 30)
        assert streamed.error == whole.error == "worker_unavailable"
        assert (streamed.status, whole.status) == (200, 503)
        assert int(whole.headers["retry-after"]) >= 1
        assert b": keep-alive\n\n" in streamed.read


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("text", "choices", "innocents"), [(POISON, 1, 24), (POISON_AT_ONCE, 3, 8)])
def test_fatal_request_takes_nobody_with_it(tmp_path: Path, text: str, choices: int, innocents: int) -> None:
    with serving(tmp_path, " ".join(STEP)) as served:
        beside = ask_many(served.url, innocents, TOKENS)
        wait_until_flowing(beside[:8:2])
        poison = ask(served.url, text, stream=False, seed=1, n=choices)
        wait_for([poison, *beside], 120)
        assert_undisturbed(beside, TOKENS)
        assert (poison.status, poison.error) == (500, "worker_crashed")
        assert poison.headers["x-should-retry"] == "false"
        served.wait_ready()
        assert crashes(served) <= 3
